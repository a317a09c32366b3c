"""KV cache of finished rows that keep their slots for later requests of the same row.

The keys and values of a token depend only on the tokens before it. So the part of the next prompt that matches the
tokens in the row's slot, from the first one on, need not be computed again. A cached prefix fills at most its slot.
Slots of cached rows follow those of active rows, in any order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.lm.base import SlotRequest
from partita.lm.row import Row
from partita.lm.slot_kv_cache import SlotKVCache


@dataclass
class CachedPrefix:
    """A finished row that keeps its slot."""

    slot: int
    ids: list[int]
    """The tokens with cached keys and values: all but the last new one, which was never an input."""


class PrefixCache:
    """The finished rows that keep their slots, by row."""

    def __init__(self, pool: SlotKVCache) -> None:
        self.pool = pool
        self.rows: dict[int, CachedPrefix] = {}

    def keep(self, row: Row, *, slot: int) -> None:
        """Keep the slot of a finished row."""
        self.rows[row.request.row] = CachedPrefix(slot, [*row.request.input_ids, *row.new[:-1]])

    def forget(self, names: Iterable[int]) -> None:
        """Release the slots of rows."""
        for name in names:
            self.rows.pop(name, None)

    def unread(self, request: SlotRequest) -> int:
        """Return the prompt tokens to prefill, without the shared prefix and the row's cached tokens."""
        return len(request.input_ids) - max(self.pool.place.prefix, self.common(request))

    def taken(self, requests: Sequence[SlotRequest], *, first: int) -> tuple[Sequence[SlotRequest], list[int]]:
        """Return requests in the order of their slots from `first` on, and the number of tokens to prefill of each.

        Cached tokens are moved there and their entries removed; if the prefill fails, the prompts are later computed
        from the shared prefix on.
        """
        if self.rows:
            prefix = self.pool.place.prefix
            self.forget([request.row for request in requests if self.common(request) <= prefix])
            requests = self.gather(requests, first=first)
        unread = [self.unread(request) for request in requests]
        self.forget(request.row for request in requests)
        return requests, unread

    def common(self, request: SlotRequest) -> int:
        """Return the prompt tokens that are cached in the row's slot; the last one is always computed."""
        cached = self.rows.get(request.row)
        if cached is None:
            return 0
        most = min(len(cached.ids), len(request.input_ids) - 1)
        ids = list(request.input_ids[:most])
        if ids == cached.ids[:most]:
            return most
        return next(place for place, (one, other) in enumerate(zip(ids, cached.ids, strict=False)) if one != other)

    def gather(self, requests: Sequence[SlotRequest], *, first: int) -> list[SlotRequest]:
        """Move the cached tokens of requests into the slots from `first` on; return requests in slot order.

        Other cached rows make room, and are dropped if there is no free slot.
        """
        slots = range(first, first + len(requests))
        mine = {request.row: self.rows[request.row] for request in requests if request.row in self.rows}
        others = {cached.slot: name for name, cached in self.rows.items() if name not in mine}
        places = {cached.slot: name for name, cached in mine.items() if cached.slot in slots}
        left = [request.row for request in requests if request.row not in places.values()]
        # Requests with cached tokens first: they free their slots for others.
        left.sort(key=lambda name: name not in mine)
        for slot in slots:
            if slot in places:
                continue
            places[slot] = name = left.pop(0)
            if name in mine:
                self.bring(mine[name], to=slot, other=others.pop(slot, None))
            elif slot in others:
                self.move_away(others.pop(slot), behind=slots.stop)
        by_name = {request.row: request for request in requests}
        return [by_name[places[slot]] for slot in slots]

    def bring(self, kept: CachedPrefix, *, to: int, other: int | None) -> None:
        """Move a cached row to another slot, and a cached row in that slot to its place."""
        start = self.pool.place.prefix
        if other is None:
            self.pool.move([(kept.slot, to)], start=start, end=len(kept.ids))
        else:
            end = max(len(kept.ids), len(self.rows[other].ids))
            self.pool.swap(kept.slot, to, start=start, end=end)
            self.rows[other].slot = kept.slot
        kept.slot = to

    def move_away(self, name: int, *, behind: int) -> None:
        """Move a cached row to a free slot at or after `behind`, or drop it."""
        taken = {cached.slot for cached in self.rows.values()}
        free = next((slot for slot in range(behind, self.pool.place.slots) if slot not in taken), None)
        if free is None:
            del self.rows[name]
            return
        cached = self.rows[name]
        self.pool.move([(cached.slot, free)], start=self.pool.place.prefix, end=len(cached.ids))
        cached.slot = free
