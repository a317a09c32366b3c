"""Who holds what: the places of a plan are dealt to workers in order, and what a dead one has left is dealt again."""

import heapq
from collections.abc import Hashable


class Assignments:
    """Places from 0 to `total` - 1. Each is held by one worker at most, and answered once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.dealt = 0
        """Places before this one were dealt, at least once."""
        self.returned: list[int] = []
        """A heap of places that a worker has left."""
        self.held: dict[Hashable, set[int]] = {}

    @property
    def left(self) -> int:
        """Places that nobody holds yet."""
        return self.total - self.dealt + len(self.returned)

    @property
    def done(self) -> bool:
        """Whether every place is answered."""
        return not self.left and not any(self.held.values())

    def holds(self, worker: Hashable) -> int:
        """Places that a worker was dealt and has not answered."""
        return len(self.held.get(worker, ()))

    def assign(self, worker: Hashable, wanted: int) -> list[int]:
        """The next places, the first ones of the plan first; at most `wanted`."""
        places = [heapq.heappop(self.returned) for _ in range(min(wanted, len(self.returned)))]
        end = min(self.total, self.dealt + max(0, wanted - len(places)))
        places += range(self.dealt, end)
        self.dealt = end
        self.held.setdefault(worker, set()).update(places)
        return places

    def answer(self, worker: Hashable, place: int) -> None:
        """A worker has answered a place that it holds."""
        self.held[worker].remove(place)

    def requeue(self, worker: Hashable) -> int:
        """What a worker holds is there for others again; its number."""
        places = self.held.pop(worker, set())
        for place in places:
            heapq.heappush(self.returned, place)
        return len(places)
