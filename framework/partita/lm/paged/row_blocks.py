"""Which blocks of the KV cache a row gets: those of other rows as far as its prompt begins like theirs, and its own.

Blocks come from the shared prefix of all prompts, from a finished row that is kept for its next turn, or, for requests
that say so, from rows of the same prefix group (`SlotRequest.prefix_group`).
"""

from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import NamedTuple

import torch

from partita.lm.base import SHORTEST_PREFIX, SlotRequest, common_tokens
from partita.lm.paged.blocks import BlockPool, Copy, blocks_for
from partita.lm.paged.cache import PagedKVCache
from partita.lm.paged.rows import PagedRow


class Cached(NamedTuple):
    """Tokens in the KV cache."""

    ids: Sequence[int]
    blocks: Sequence[int]
    prefix_group: int | None = None
    """Requests of this prefix group may use it."""


class RowBlocks:
    """The blocks of rows, of the shared prefix, and of kept rows."""

    def __init__(self, cache: PagedKVCache, pool: BlockPool, *, device: torch.device) -> None:
        self.cache, self.pool, self.device = cache, pool, device
        self.prefix = Cached((), ())
        self.kept: dict[int, Cached] = {}
        """Finished rows by the name of their row, the oldest first; those of a prefix group have a negative name."""
        self.names = count(-1, -1)

    def most_blocks(self, request: SlotRequest) -> int:
        """Return the number of blocks of a row that shares none."""
        return blocks_for(len(request.input_ids) + request.max_new_tokens, block_tokens=self.pool.block_tokens)

    def longest_beginning(self, request: SlotRequest, rows: Iterable[Cached]) -> tuple[Cached, int]:
        """Return what is cached of the beginning of a prompt, and the number of common tokens.

        Args:
            request: The request.
            rows: What is cached of rows that are not finished.
        """
        sources = [self.prefix]
        if request.row in self.kept:
            sources.append(self.kept[request.row])
        if request.prefix_group is not None:
            everything = chain(self.kept.values(), rows)
            sources += [cached for cached in everything if cached.prefix_group == request.prefix_group]
        common = [common_tokens(request.input_ids, source.ids) for source in sources]
        common[1:] = [tokens if tokens >= SHORTEST_PREFIX else 0 for tokens in common[1:]]
        best = max(range(len(sources)), key=lambda index: common[index])
        return sources[best], common[best]

    def take(self, request: SlotRequest, rows: Iterable[Cached]) -> tuple[list[int], int, list[Copy]]:
        """Return the blocks of a row, the number of its first tokens that they hold, and the blocks to copy.

        Args:
            request: The request.
            rows: What is cached of rows that are not finished.
        """
        source, shared = self.longest_beginning(request, rows)
        name = next((name for name, cached in self.kept.items() if cached is source), None)
        if name is not None:
            blocks, copies = self.take_over(request, self.kept.pop(name), shared=shared)
        else:
            blocks, copies = self.fork(request, source, shared=shared)
        self.forget(request.row)
        return blocks, shared, copies

    def fork(self, request: SlotRequest, source: Cached, *, shared: int) -> tuple[list[int], list[Copy]]:
        """Return the blocks of a row that begins like another one that stays, and those to copy."""
        tokens = len(request.input_ids) + request.max_new_tokens
        self.make_room(self.most_blocks(request) - shared // self.pool.block_tokens)
        return self.pool.fork(source.blocks, shared=shared, tokens=tokens)

    def take_over(self, request: SlotRequest, kept: Cached, *, shared: int) -> tuple[list[int], list[Copy]]:
        """Return the blocks of a row that continues a kept one, and those to copy."""
        full = shared // self.pool.block_tokens
        held = blocks_for(shared, block_tokens=self.pool.block_tokens)
        self.release(kept.blocks[held:])
        if held > full and self.pool.users[kept.blocks[full]] > 1:
            blocks, copies = self.fork(request, kept, shared=shared)
            self.release(kept.blocks[:held])
            return blocks, copies
        needed = self.most_blocks(request) - held
        self.make_room(needed)
        return [*kept.blocks[:held], *self.pool.allocate(needed)], []

    def make_room(self, blocks: int) -> None:
        """Forget kept rows, the oldest first, until this many blocks are free."""
        while blocks > len(self.pool.free) and self.kept:
            self.forget(next(iter(self.kept)))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy blocks."""
        self.cache.copy(copies, device=self.device)

    def release(self, blocks: Iterable[int], *, broken: bool = False) -> None:
        """Give back the blocks of a row, cleared if its scores were NaN."""
        self.cache.clear(self.pool.release(blocks, broken=broken), device=self.device)

    def end(self, row: PagedRow) -> None:
        """Give back the blocks of a finished row, or keep those of its tokens."""
        if not row.request.keep or row.unclean:
            self.release(row.blocks, broken=row.unclean)
            return
        # The last token may never have been an input.
        ids = [*row.request.input_ids, *row.new[:-1]]
        used = blocks_for(len(ids), block_tokens=self.pool.block_tokens)
        self.release(row.blocks[used:])
        prefix_group = row.request.prefix_group
        name = row.request.row if prefix_group is None else next(self.names)
        self.forget(name)
        self.kept[name] = Cached(ids, row.blocks[:used], prefix_group)

    def forget(self, name: int) -> None:
        """Give back the blocks of a kept row."""
        kept = self.kept.pop(name, None)
        if kept is not None:
            self.release(kept.blocks)
