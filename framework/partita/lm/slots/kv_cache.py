"""A preallocated KV cache of slots, one row per slot.

The cache is allocated once: nothing is concatenated or copied between steps. A layer writes the keys and values of new
tokens in place and attends to a view of the active slots. A shared prefix is computed once and stored in the first
slot; if the attention cannot read it there, it is copied to all other slots.

Shapes: S slots, T tokens of a slot, N rows of a pass, W tokens of the longest of them, L tokens of a pass.
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

COPIED_TOKENS = 4096
"""Maximum number of tokens, including the prefix, that are concatenated at a time during prefill."""


class CacheLayout:
    """Where the next forward pass writes, and what it attends to; shared by all layers."""

    def __init__(self, *, slots: int, tokens: int) -> None:
        self.slots, self.tokens = slots, tokens
        self.copied_tokens = COPIED_TOKENS
        self.prefix = 0
        """Length of the shared prefix in tokens."""
        self.prefix_in_first_slot = False
        """Whether the prefix is stored in the first slot only."""
        self.layer: SlotLayer | None = None
        """The layer that was written last, during a pass."""
        self.chunks: Sequence[tuple[int, int, int]] = ()
        self.lengths: Sequence[int] = ()
        self.read(0, 1, start=0)

    def read(self, first: int, rows: int, *, start: int) -> None:
        """Set up a pass over L tokens of each of these slots, from token `start` on."""
        self.first, self.rows, self.start = first, rows, start
        self.positions_NL: torch.Tensor | None = None
        self.width = 0
        self.indices: dict[int, torch.Tensor] = {}
        self.gathered: dict[tuple[int, ...], Any] = {}
        """What attention computed in the pass for other layers with the same mask and heads."""

    def extend(
        self,
        first: int,
        positions_NL: torch.Tensor,
        *,
        width: int,
        chunks: Sequence[tuple[int, int, int]] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        """Set up a pass over L tokens of each of N slots, at positions per slot.

        Args:
            first: First slot.
            positions_NL: Positions in the slot.
            width: Number of positions that are attended to.
            chunks: First row, end and width of rows that attend to fewer positions.
            lengths: Length of each row with the new token, if known: a sliding window is then read from its start on.
        """
        self.first, self.rows = first, len(positions_NL)
        self.positions_NL, self.width = positions_NL, width
        self.chunks = chunks or [(0, self.rows, width)]
        self.lengths = lengths
        self.indices, self.gathered = {}, {}

    def first_seen(self, start: int, end: int, window: int | None) -> int:
        """Return the first position that the new tokens of these rows may attend to in a layer with this window."""
        return max(0, min(self.lengths[start:end]) - window) if window and self.lengths else 0

    def index(self, heads: int) -> torch.Tensor:
        """Return the indices [N * heads * L] of the pass in a cache viewed as [S * heads * T]."""
        indices = self.indices.get(heads)
        if indices is None:
            assert self.positions_NL is not None
            device = self.positions_NL.device
            lines = torch.arange(self.first * heads, (self.first + self.rows) * heads, device=device) * self.tokens
            indices = self.indices[heads] = (lines.view(-1, heads, 1) + self.positions_NL[:, None]).flatten()
        return indices


class PreallocatedLayer(CacheLayerMixin, ABC):  # type: ignore[misc]
    """Keys and values of a layer, allocated in the first forward pass."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    @abstractmethod
    def shape(self, states: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of all keys, or of all values.

        Args:
            states: Keys or values of a pass, [rows, heads, tokens, head size].
        """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeros: unwritten positions are masked, but a mask does not remove NaN."""
        with torch.inference_mode(False):  # inference tensors cannot be modified outside of inference mode
            self.keys, self.values = (
                untouched_zeros(self.shape(states), like=states) for states in (key_states, value_states)
            )
        self.is_initialized = True


class PreallocatedCache(Cache):  # type: ignore[misc]
    """A KV cache of preallocated layers; memory is allocated in the first forward pass."""

    def __init__(self, new_layer: Callable[[], PreallocatedLayer]) -> None:
        """Set up the cache; `new_layer` returns one layer."""
        super().__init__(layer_class_to_replicate=new_layer)

    @property
    def held(self) -> list[torch.Tensor]:
        """Keys and values of every layer."""
        return [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]


class SlotLayer(PreallocatedLayer):
    """Keys and values [S, heads, T, head size] of a layer."""

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__()
        self.layout = layout

    def shape(self, states: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of all keys, or of all values."""
        return self.layout.slots, states.shape[1], self.layout.tokens, states.shape[3]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; return those that the new tokens attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = self.layout
        layout.layer = self
        slots = slice(layout.first, layout.first + layout.rows)
        if layout.positions_NL is None:
            end = layout.start + key_states.shape[2]
            self.keys[slots, :, layout.start : end] = key_states
            self.values[slots, :, layout.start : end] = value_states
            if not layout.start:
                return key_states, value_states
            return self.keys[slots, :, :end], self.values[slots, :, :end]
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.view(-1, held.shape[3]).index_copy_(0, layout.index(held.shape[1]), new.reshape(-1, held.shape[3]))
        return self.keys[slots, :, : layout.width], self.values[slots, :, : layout.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask size; called only without a mask, when there are no earlier tokens."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens before the pass."""
        return self.layout.start

    def get_max_length(self) -> int:
        """Return the number of tokens of a slot."""
        return self.layout.tokens


class SlotKVCache(PreallocatedCache):
    """The slots of all layers."""

    def __init__(self, *, slots: int, tokens: int) -> None:
        """Set up the cache."""
        self.layout = CacheLayout(slots=slots, tokens=tokens)
        super().__init__(partial(SlotLayer, self.layout))

    def broadcast_prefix(self, tokens: int) -> None:
        """Copy the first tokens of the first slot to all others."""
        for held in self.held:
            held[1:, :, :tokens] = held[:1, :, :tokens]

    def move(self, moves: list[tuple[int, int]], *, start: int, end: int) -> None:
        """Copy tokens `start` to `end` between slots, given as pairs of source and target."""
        for held in self.held if moves else ():
            for source, target in moves:
                held[target, :, start:end] = held[source, :, start:end]

    def fork(self, source: int, *, targets: range, start: int, end: int) -> None:
        """Copy tokens `start` to `end` of a slot to several slots.

        Args:
            source: The slot to copy.
            targets: Slots next to each other, without `source`.
            start: First token.
            end: Token after the last.
        """
        for held in self.held:
            held[targets.start : targets.stop, :, start:end] = held[source, :, start:end]

    def swap(self, one: int, other: int, *, start: int, end: int) -> None:
        """Swap tokens `start` to `end` of two slots.

        Args:
            one: A slot.
            other: Another slot.
            start: First token.
            end: Token after the last.
        """
        for held in self.held:
            before = held[one, :, start:end].clone()
            held[one, :, start:end] = held[other, :, start:end]
            held[other, :, start:end] = before

    def clear(self, slot: int, *, start: int) -> None:
        """Zero a slot from token `start` on, which removes NaN."""
        for held in self.held:
            held[slot, :, start:] = 0


def untouched_zeros(shape: tuple[int, ...], *, like: torch.Tensor) -> torch.Tensor:
    """Allocate zeros; on a CPU, untouched pages take no memory.

    The memory is mapped directly, because the C library would request huge pages, of which a single token takes a whole
    one.

    Raises:
        MemoryError: The allocation failed.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size(), flags=flags)
    except OSError as error:
        raise MemoryError(f"slots of {math.prod(shape) * like.element_size():,} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
