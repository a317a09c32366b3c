"""The paged KV cache of a model: blocks of a fixed number of tokens, which rows find through a block table.

It is allocated once. A pass writes its keys and values at indices that are data, so that a captured pass writes for
other rows when it is replayed.

Shapes: N rows, T tokens of a pass in all rows, M blocks of a row, P blocks of the pool, K tokens of a block, H heads of
keys and values, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from partita.lm.paged.blocks import EMPTY, Copy
from partita.lm.slots.kv_cache import PreallocatedCache, PreallocatedLayer
from partita_trainers.device_copies import to_device


@dataclass
class PagedPass:
    """Where a forward pass writes, and what it attends to."""

    tables_NM: torch.Tensor
    """The blocks of each row, int32."""
    lengths_N: torch.Tensor
    """Tokens of each row after the pass, int32."""
    starts_Nplus1: torch.Tensor
    """The first token of each row in the pass, and the number of tokens of the pass, int32."""
    written_T: torch.Tensor
    """Where each token of the pass is written: its index in the pool viewed as [P * K]."""
    parts: Sequence[tuple[int, int]] | None = None
    """Tokens of the pass and of the whole row, for each row; None if the pass has one token of each row."""

    @property
    def longest_part(self) -> int:
        """Most tokens of a row in the pass."""
        return 1 if self.parts is None else max(tokens for tokens, _ in self.parts)


def written_at(tables_NM: torch.Tensor, positions_N: torch.Tensor, *, block_tokens: int) -> torch.Tensor:
    """Return where the tokens at these positions are written, one for each row [N]."""
    blocks_N1 = tables_NM.gather(1, (positions_N // block_tokens)[:, None])
    return blocks_N1[:, 0].long() * block_tokens + positions_N % block_tokens


class PagedLayer(PreallocatedLayer):
    """Keys and values [P, K, H, D] of a layer."""

    def __init__(self, size: "PagedSize") -> None:
        super().__init__()
        self.size = size

    def shape(self, states: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of all keys, or of all values."""
        return self.size.blocks, self.size.block_tokens, states.shape[1], states.shape[3]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the pass, [rows, H, tokens, D]; return the whole pool, as the attention expects."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        now = self.size.now
        assert now is not None
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            new_THD = new.transpose(1, 2).reshape(-1, held.shape[2], held.shape[3])
            held.view(-1, held.shape[2], held.shape[3]).index_copy_(0, now.written_T, new_THD)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask size; the attention needs no mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of tokens of the pool."""
        return self.size.blocks * self.size.block_tokens


@dataclass
class PagedSize:
    """What all layers share."""

    blocks: int
    block_tokens: int
    now: PagedPass | None = None
    """The current pass."""


class PagedKVCache(PreallocatedCache):
    """The blocks of all layers."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        """Set up the cache.

        Args:
            blocks: Number of blocks, with the reserved ones.
            block_tokens: Tokens of a block.
        """
        self.size = PagedSize(blocks, block_tokens)
        super().__init__(partial(PagedLayer, self.size))

    def copy(self, copies: Sequence[Copy], *, device: torch.device) -> None:
        """Copy blocks, all in one operation for each tensor."""
        if not copies:
            return
        pairs = tensor_on_device(copies, device=device)
        for held in self.held:
            held.index_copy_(0, pairs[:, 1], held.index_select(0, pairs[:, 0]))

    def clear(self, blocks: Sequence[int], *, device: torch.device) -> None:
        """Zero blocks, which removes NaN."""
        if not blocks:
            return
        indices = tensor_on_device(blocks, device=device)
        for held in self.held:
            held.index_fill_(0, indices, 0)


def table_of(rows: Sequence[Sequence[int]], *, width: int, device: torch.device) -> torch.Tensor:
    """Return the block table of rows [N, M], int32."""
    padded = [[*blocks, *[EMPTY] * (width - len(blocks))] for blocks in rows]
    return tensor_on_device(padded, device=device, dtype=torch.int32)


def tensor_on_device(values: Sequence[Any], *, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Return numbers as a tensor on a device. The host does not wait for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)
