"""The reuse of cached tokens: of finished rows' slots by later requests, and of equal beginnings by copying.

The keys and values of a token depend only on the tokens before it. So the part of the next prompt that matches the
tokens in the row's slot, from the first one on, need not be computed again. A cached prefix fills at most its slot.
Slots of cached rows follow those of active rows, in any order.

A request whose prompt may begin like those of other rows (`SlotRequest.prefix_group`) takes over the slot of the
finished row of its prefix group with the longest common beginning, or copies that of an active row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from partita.lm.base import SHORTEST_PREFIX, SlotRequest, common_tokens
from partita.lm.decoding.row import Row
from partita.lm.slots.kv_cache import SlotKVCache


@dataclass
class CachedPrefix:
    """A finished row that keeps its slot."""

    slot: int
    ids: list[int]
    """The tokens with cached keys and values: all but the last new one, which was never an input."""
    prefix_group: int | None
    """Requests of this prefix group may use it."""


class PrefixCache:
    """The finished rows that keep their slots, by row."""

    def __init__(self, pool: SlotKVCache) -> None:
        self.pool = pool
        self.rows: dict[int, CachedPrefix] = {}
        self.names = count(-1, -1)
        """Names of finished rows that any later request may use."""

    def keep(self, row: Row, *, slot: int) -> None:
        """Keep the slot of a finished row."""
        prefix_group = row.request.prefix_group
        name = row.request.row if prefix_group is None else next(self.names)
        self.rows[name] = CachedPrefix(slot, [*row.request.input_ids, *row.new[:-1]], prefix_group)

    def forget(self, names: Iterable[int]) -> None:
        """Release the slots of rows."""
        for name in names:
            self.rows.pop(name, None)

    def uncached_tokens(self, request: SlotRequest, active: Sequence[Row]) -> int:
        """Return the prompt tokens to prefill: neither those of the shared prefix nor those cached for it."""
        common = self.common(request)
        if request.prefix_group is not None:
            common = max(common, self.longest_kept(request)[1], longest_active(request, active)[1])
        return len(request.input_ids) - max(self.pool.layout.prefix, common)

    def take_over(self, requests: Sequence[SlotRequest], active: Sequence[Row]) -> None:
        """Give the slots of finished rows to the requests whose prompts begin like them, if no `active` row does."""
        for request in requests:
            if request.prefix_group is not None:
                name, common = self.longest_kept(request)
                if name is not None and common > longest_active(request, active)[1]:
                    self.rows[request.row] = self.rows.pop(name)

    def longest_kept(self, request: SlotRequest) -> tuple[int | None, int]:
        """Return the finished member with the longest common beginning, and its tokens; else None, 0."""
        members = ((name, kept) for name, kept in self.rows.items() if kept.prefix_group == request.prefix_group)
        free = ((name, common_tokens(request.input_ids, kept.ids)) for name, kept in members if name < 0)
        name, common = max(free, key=lambda found: found[1], default=(None, 0))
        return (name, common) if common >= SHORTEST_PREFIX else (None, 0)

    def copy_beginnings(self, requests: Sequence[SlotRequest], uncached: list[int], active: Sequence[Row]) -> list[int]:
        """Copy common beginnings of other rows to the slots after the `active` rows; return the tokens to prefill.

        Args:
            requests: The requests of these slots.
            uncached: The prompt tokens to prefill of each, before.
            active: The active rows.
        """
        sources = [(row.request.prefix_group, slot, row.request.input_ids) for slot, row in enumerate(active)]
        sources += [(kept.prefix_group, kept.slot, kept.ids) for kept in self.rows.values()]
        for index, request in enumerate(requests):
            cached = len(request.input_ids) - uncached[index]
            if cached >= SHORTEST_PREFIX:
                sources.append((request.prefix_group, len(active) + index, request.input_ids[:cached]))
        for index, request in enumerate(requests):
            if request.prefix_group is None:
                continue
            members = ((slot, ids) for prefix_group, slot, ids in sources if prefix_group == request.prefix_group)
            slot, common = max(
                ((slot, common_tokens(request.input_ids, ids)) for slot, ids in members),
                key=lambda found: found[1],
                default=(0, 0),
            )
            start = len(request.input_ids) - uncached[index]
            if common >= max(start + 1, SHORTEST_PREFIX):
                self.pool.move([(slot, len(active) + index)], start=start, end=common)
                uncached[index] = len(request.input_ids) - common
        return uncached

    def move_to_slots(self, requests: Sequence[SlotRequest], *, first: int) -> tuple[Sequence[SlotRequest], list[int]]:
        """Return requests in the order of their slots from `first` on, and the number of tokens to prefill of each.

        Cached tokens are moved there and their entries removed; if the prefill fails, the prompts are later computed
        from the shared prefix on.
        """
        if self.rows:
            prefix = self.pool.layout.prefix
            self.forget([request.row for request in requests if self.common(request) <= prefix])
            requests = self.gather(requests, first=first)
        uncached = [len(request.input_ids) - max(self.pool.layout.prefix, self.common(request)) for request in requests]
        self.forget(request.row for request in requests)
        return requests, uncached

    def common(self, request: SlotRequest) -> int:
        """Return the prompt tokens that are cached in the row's slot; the last one is always computed."""
        cached = self.rows.get(request.row)
        return 0 if cached is None else common_tokens(request.input_ids, cached.ids)

    def gather(self, requests: Sequence[SlotRequest], *, first: int) -> list[SlotRequest]:
        """Move the cached tokens of requests into the slots from `first` on; return requests in slot order.

        Other cached rows make room, and are dropped if there is no free slot.
        """
        slots = range(first, first + len(requests))
        mine = {request.row: self.rows[request.row] for request in requests if request.row in self.rows}
        others = {cached.slot: name for name, cached in self.rows.items() if name not in mine}
        names = {cached.slot: name for name, cached in mine.items() if cached.slot in slots}
        left = [request.row for request in requests if request.row not in names.values()]
        # Requests with cached tokens first: they free their slots for others.
        left.sort(key=lambda name: name not in mine)
        for slot in slots:
            if slot in names:
                continue
            names[slot] = name = left.pop(0)
            if name in mine:
                self.bring(mine[name], to=slot, other=others.pop(slot, None))
            elif slot in others:
                self.move_away(others.pop(slot), first_slot=slots.stop)
        by_name = {request.row: request for request in requests}
        return [by_name[names[slot]] for slot in slots]

    def bring(self, kept: CachedPrefix, *, to: int, other: int | None) -> None:
        """Move a cached row to another slot, and a cached row in that slot to its place."""
        start = self.pool.layout.prefix
        if other is None:
            self.pool.move([(kept.slot, to)], start=start, end=len(kept.ids))
        else:
            end = max(len(kept.ids), len(self.rows[other].ids))
            self.pool.swap(kept.slot, to, start=start, end=end)
            self.rows[other].slot = kept.slot
        kept.slot = to

    def move_away(self, name: int, *, first_slot: int) -> None:
        """Move a cached row to a free slot from `first_slot` on, or drop it."""
        taken = {cached.slot for cached in self.rows.values()}
        free = next((slot for slot in range(first_slot, self.pool.layout.slots) if slot not in taken), None)
        if free is None:
            del self.rows[name]
            return
        cached = self.rows[name]
        self.pool.move([(cached.slot, free)], start=self.pool.layout.prefix, end=len(cached.ids))
        cached.slot = free


def longest_active(request: SlotRequest, active: Sequence[Row]) -> tuple[int | None, int]:
    """Return the slot of the active member with the longest common beginning, and its tokens; else None, 0."""
    members = (
        (slot, row.request) for slot, row in enumerate(active) if row.request.prefix_group == request.prefix_group
    )
    found = ((slot, common_tokens(request.input_ids, other.input_ids)) for slot, other in members)
    slot, common = max(found, key=lambda pair: pair[1], default=(None, 0))
    return (slot, common) if common >= SHORTEST_PREFIX else (None, 0)
