"""Prefill with only the last tokens in the last layer.

Prefill needs the KV cache of all tokens, but logits of the last one only. With few layers this saves a good part of
prefill: with four, a fifth.

Shapes: N prompts, L tokens of the longest, H hidden size.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from partita.lm.losses.last_layer import KeysComputed, SplitLayerHook
from partita.lm.slots.kv_cache import SlotKVCache, SlotLayer


class StoppingLayer(SlotLayer):
    """Stops the forward pass after writing, if `stops` is set."""

    stops = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; raise KeysComputed or return what the new tokens attend to."""
        states = super().update(key_states, value_states, *args, **kwargs)
        if self.stops:
            raise KeysComputed
        return states


class LastTokenHook(SplitLayerHook):
    """Passes only the last tokens of prompts through the last layer, while enabled."""

    pool: SlotKVCache
    ends_N: torch.Tensor
    positions_N1: torch.Tensor
    mask_N11W: torch.Tensor

    def __init__(self, layer: nn.Module, *, number: int) -> None:
        """Register the hook; `layer` is the last of `number` layers."""
        super().__init__(layer)
        self.number = number

    @contextmanager
    def only(
        self, pool: SlotKVCache, ends_N: torch.Tensor, positions_N1: torch.Tensor, mask_N11W: torch.Tensor
    ) -> Iterator[None]:
        """Continue after the keys of the last layer with the last token of each prompt.

        Args:
            pool: The KV cache.
            ends_N: Index of each prompt's last token in the pass.
            positions_N1: Position of each last token in its slot.
            mask_N11W: Attention mask of the last tokens.

        Raises:
            RuntimeError: In the forward pass, if the layer does not write its keys to the cache.
        """
        self.pool, self.ends_N, self.positions_N1, self.mask_N11W = pool, ends_N, positions_N1, mask_N11W
        with self.enable():
            yield

    @contextmanager
    def stopping(self, hidden_BTH: torch.Tensor) -> Iterator[None]:
        """Stop the layer when it has written its keys and values to the cache."""
        while len(self.pool.layers) < self.number:
            self.pool.layers.append(StoppingLayer(self.pool.layout))
        cache = self.pool.layers[self.number - 1]
        cache.stops = True
        try:
            yield
        finally:
            cache.stops = False

    def choose(self, value: torch.Tensor) -> torch.Tensor:
        """Return the last tokens [N, 1, ...] of a tensor of all tokens [N or 1, L, ...]."""
        count = len(self.ends_N)
        if value.shape[0] not in (1, count):
            return value
        rows = torch.arange(count, device=value.device) if value.shape[0] == count else torch.zeros_like(self.ends_N)
        return value[rows, self.ends_N][:, None]

    def completed(self, given: inspect.BoundArguments) -> inspect.BoundArguments:
        """Return the arguments with the mask of the last tokens, which attend to the cache."""
        self.pool.layout.extend(self.pool.layout.first, self.positions_N1, width=self.mask_N11W.shape[3])
        extra = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        named = "attention_mask" in self.signature.parameters
        held = given.arguments if named or extra is None else given.arguments.setdefault(extra, {})
        held["attention_mask"] = self.mask_N11W
        return given
