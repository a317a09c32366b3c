"""Rows that have ended and stay in their slots, for rows of the same name that go on from there.

What the keys of a token are follows from the tokens before it. So whatever the next prompt of a row has in common with
the tokens that stand in its slot, from the first one on, need not be read again. The longest prompt that is kept is as
long as its slot, and slots of rows that stay lie behind those of live rows, in any order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.lm.base import SlotRequest
from partita.lm.sampler import Row
from partita.lm.slot_kv_cache import SlotKVCache


@dataclass
class CachedPrefix:
    """A row that stays."""

    slot: int
    ids: list[int]
    """The tokens whose keys and values stand in it: all but the last one of the answer, which nothing has read."""


class PrefixCache:
    """The rows of a pool that stay, by name."""

    def __init__(self, pool: SlotKVCache) -> None:
        self.pool = pool
        self.rows: dict[int, CachedPrefix] = {}

    def keep(self, row: Row, *, slot: int) -> None:
        """A row that has ended stays in its slot."""
        self.rows[row.request.row] = CachedPrefix(slot, [*row.request.input_ids, *row.new[:-1]])

    def forget(self, names: Iterable[int]) -> None:
        """Rows do not stay any longer."""
        for name in names:
            self.rows.pop(name, None)

    def unread(self, request: SlotRequest) -> int:
        """Tokens of a prompt that are to be read: those behind the common beginning, and behind what its row holds."""
        return len(request.input_ids) - max(self.pool.place.prefix, self.common(request))

    def taken(self, requests: Sequence[SlotRequest], *, first: int) -> tuple[Sequence[SlotRequest], list[int]]:
        """The requests in the order of their slots, from `first` on, and how many tokens of each are to be read.

        What they had kept stands there and is theirs; should the pass that reads the rest fail, they are read whole.
        """
        if self.rows:
            prefix = self.pool.place.prefix
            self.forget([request.row for request in requests if self.common(request) <= prefix])
            requests = self.gather(requests, first=first)
        unread = [self.unread(request) for request in requests]
        self.forget(request.row for request in requests)
        return requests, unread

    def common(self, request: SlotRequest) -> int:
        """Tokens of a prompt that stand in its row's slot; the last one is always read."""
        kept = self.rows.get(request.row)
        if kept is None:
            return 0
        most = min(len(kept.ids), len(request.input_ids) - 1)
        ids = list(request.input_ids[:most])
        if ids == kept.ids[:most]:
            return most
        return next(place for place, (one, other) in enumerate(zip(ids, kept.ids, strict=False)) if one != other)

    def gather(self, requests: Sequence[SlotRequest], *, first: int) -> list[SlotRequest]:
        """The same requests in the order of their slots, which are those from `first` on; what they have kept is there.

        Others that stay there make room, and those for which there is none do not stay.
        """
        slots = range(first, first + len(requests))
        mine = {request.row: self.rows[request.row] for request in requests if request.row in self.rows}
        others = {kept.slot: name for name, kept in self.rows.items() if name not in mine}
        places = {kept.slot: name for name, kept in mine.items() if kept.slot in slots}
        left = [request.row for request in requests if request.row not in places.values()]
        # Those that bring something come first: they leave their slots to others.
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
        """A row comes to another slot; a row that stays there takes its own."""
        start = self.pool.place.prefix
        if other is None:
            self.pool.move([(kept.slot, to)], start=start, end=len(kept.ids))
        else:
            end = max(len(kept.ids), len(self.rows[other].ids))
            self.pool.swap(kept.slot, to, start=start, end=end)
            self.rows[other].slot = kept.slot
        kept.slot = to

    def move_away(self, name: int, *, behind: int) -> None:
        """A row leaves its slot for a free one behind others, or does not stay."""
        taken = {kept.slot for kept in self.rows.values()}
        free = next((slot for slot in range(behind, self.pool.place.slots) if slot not in taken), None)
        if free is None:
            del self.rows[name]
            return
        kept = self.rows[name]
        self.pool.move([(kept.slot, free)], start=self.pool.place.prefix, end=len(kept.ids))
        kept.slot = free
