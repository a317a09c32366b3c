"""Assignment of work items to workers in plan order; items of a dead worker are assigned again."""

import heapq
from collections.abc import Hashable


class Assignments:
    """Item indices from 0 to `total` - 1. Each is held by at most one worker, and answered once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.dealt = 0
        """Items before this index have been assigned at least once."""
        self.returned: list[int] = []
        """A heap of items returned by lost workers."""
        self.held: dict[Hashable, set[int]] = {}

    @property
    def left(self) -> int:
        """Number of unassigned items."""
        return self.total - self.dealt + len(self.returned)

    @property
    def done(self) -> bool:
        """Whether every item is answered."""
        return not self.left and not any(self.held.values())

    def holds(self, worker: Hashable) -> int:
        """Return the number of items that a worker holds."""
        return len(self.held.get(worker, ()))

    def assign(self, worker: Hashable, wanted: int) -> list[int]:
        """Assign the next items of the plan to a worker, at most `wanted`."""
        places = [heapq.heappop(self.returned) for _ in range(min(wanted, len(self.returned)))]
        end = min(self.total, self.dealt + max(0, wanted - len(places)))
        places += range(self.dealt, end)
        self.dealt = end
        self.held.setdefault(worker, set()).update(places)
        return places

    def answer(self, worker: Hashable, place: int) -> None:
        """Mark an item that a worker holds as answered."""
        self.held[worker].remove(place)

    def requeue(self, worker: Hashable) -> int:
        """Return a worker's items to the queue, and their number."""
        places = self.held.pop(worker, set())
        for place in places:
            heapq.heappush(self.returned, place)
        return len(places)
