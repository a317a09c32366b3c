"""Distribution of a job's rows to ranks: each rank takes a few at a time until none are left.

All ranks make the same plan and share a counter of how far it is assigned. No rank waits for another: a slow rank
takes fewer rows. Rows that a rank took and did not answer are missing from the journals, and are assigned again when
the job is resumed.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


class WorkQueue:
    """Plan indices, assigned to the ranks of a process group in order."""

    def __init__(self, total: int, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """Create a queue of `total` indices. All ranks must create it at the same point of the program."""
        self.total, self.ranks = total, process_group.world_size
        self._count = process_group.shared_counter("claims") if process_group.world_size > 1 else None
        self._dealt = 0

    @property
    def left(self) -> bool:
        """Whether indices may be left."""
        return self._dealt < self.total

    def take(self, wanted: int) -> range:
        """Return the next indices; all remaining ones in a single process, and an empty range if none are left.

        With several ranks, at most `wanted`, and fewer towards the end, so that all ranks finish together.
        """
        if self._count is None:
            start, self._dealt = self._dealt, self.total
            return range(start, self.total)
        share = -(-(self.total - self._dealt) // (2 * self.ranks))
        amount = max(1, min(wanted, share))
        start = self._count(amount)
        self._dealt = min(self.total, start + amount)
        return range(min(start, self.total), self._dealt)


class RowQueue(Protocol):
    """A queue of rows to answer."""

    @property
    def left(self) -> bool:
        """Whether rows may be left."""

    def take(self, wanted: int) -> Sequence[int]:
        """Return the next rows, the longest first; possibly none, or more than `wanted` in a single process."""


class PlannedRowQueue:
    """Rows in the order of a plan, as taken by this process."""

    def __init__(
        self, order: Sequence[int], *, process_group: ProcessGroup = SINGLE_PROCESS, together: int = 1
    ) -> None:
        """Create a queue.

        Args:
            order: The rows, the same on all ranks.
            process_group: The ranks that share the rows.
            together: How many consecutive rows of `order` are always taken by the same process.
        """
        self.order, self.together = order, together
        self.claims = WorkQueue(len(order) // together, process_group=process_group)

    @property
    def left(self) -> bool:
        """Whether rows may be left."""
        return self.claims.left

    def take(self, wanted: int) -> Sequence[int]:
        """Take the next rows."""
        claimed = self.claims.take(-(-wanted // self.together))
        return self.order[claimed.start * self.together : claimed.stop * self.together]


def drain(claims: WorkQueue) -> Iterator[int]:
    """Yield the indices that this process takes, one by one."""
    while claims.left:
        yield from claims.take(1)
