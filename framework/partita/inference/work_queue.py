"""Which rows of a job a process answers: those that it claims, a few at a time, until none are left.

All ranks make the same plan, and a number that they count up together says how far it is dealt. Nobody waits for
anybody: a rank that is slow claims less. What it had claimed and did not answer is missing from the journals, and so is
claimed again when the job is started again.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


class WorkQueue:
    """The places of a plan, dealt to the ranks of a process group in order."""

    def __init__(self, total: int, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """`total` is the number of places; all ranks make their claims of a plan at the same point of their work."""
        self.total, self.ranks = total, process_group.world_size
        self._count = process_group.shared_counter("claims") if process_group.world_size > 1 else None
        self._dealt = 0

    @property
    def left(self) -> bool:
        """Whether there may be something to claim."""
        return self._dealt < self.total

    def take(self, wanted: int) -> range:
        """The next places, all of them where nobody else claims any; empty where none are left.

        Of several ranks each takes at most `wanted`, and towards the end less, so that all come to it together.
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
    """Where rows come from that are to be answered."""

    @property
    def left(self) -> bool:
        """Whether there may be more."""

    def take(self, wanted: int) -> Sequence[int]:
        """The next rows, the longest first; which may be none, and more than wanted where nobody else wants them."""


class PlannedRowQueue:
    """Rows in the order of a plan, as this process claims them."""

    def __init__(self, order: Sequence[int], *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """`order` is the same on all ranks of the process group."""
        self.order, self.claims = order, WorkQueue(len(order), process_group=process_group)

    @property
    def left(self) -> bool:
        """Whether there may be something to claim."""
        return self.claims.left

    def take(self, wanted: int) -> Sequence[int]:
        """The rows at the places that are claimed."""
        places = self.claims.take(wanted)
        return self.order[places.start : places.stop]


def drain(claims: WorkQueue) -> Iterator[int]:
    """Places that this process claims, one after the other."""
    while claims.left:
        yield from claims.take(1)
