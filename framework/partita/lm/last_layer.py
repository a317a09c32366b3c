"""Prefill with only the last tokens in the last layer.

Prefill needs the KV cache of all tokens, but logits of the last one only. So the last layer needs the keys and values
of all tokens, but everything after them only for the last token. A hook runs the layer until it has written its keys
and values, stops it, and then passes only the last tokens through. With few layers this saves a good part of prefill:
with four, a fifth.

Shapes: N prompts, L tokens of the longest, H hidden size.
"""

import inspect
from typing import Any

import torch
from torch import nn

from partita.lm.slot_kv_cache import SlotKVCache, SlotLayer


class WrittenKeys(Exception):  # noqa: N818 - it is no error
    """Raised when the layer has written its keys and values."""


class StoppingLayer(SlotLayer):
    """Stops the forward pass after writing, if `stops` is set."""

    stops = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values; raise WrittenKeys or return what the new tokens attend to."""
        states = super().update(key_states, value_states, *args, **kwargs)
        if self.stops:
            raise WrittenKeys
        return states


class LastTokens:
    """Passes only the last tokens of prompts through the last layer, while enabled."""

    def __init__(self, layer: nn.Module, *, number: int) -> None:
        """Register the hook; `layer` is the last of `number` layers."""
        self.layer, self.number = layer, number
        self.signature = inspect.signature(layer.forward)
        self.pool: SlotKVCache | None = None
        self.ends_N = self.positions_N1 = self.mask_N11W = torch.zeros(0)
        self.handle = layer.register_forward_pre_hook(self.narrow, with_kwargs=True)

    def aim(self, pool: SlotKVCache, ends_N: torch.Tensor, positions_N1: torch.Tensor, mask_N11W: torch.Tensor) -> None:
        """Enable it for one pass.

        Args:
            pool: The KV cache.
            ends_N: Index of each prompt's last token in the pass.
            positions_N1: Position of each last token in its slot.
            mask_N11W: Attention mask of the last tokens.
        """
        self.pool, self.ends_N, self.positions_N1, self.mask_N11W = pool, ends_N, positions_N1, mask_N11W

    def close(self) -> None:
        """Remove the hook."""
        self.handle.remove()

    def narrow(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the layer's arguments for the last tokens only, after all keys and values are written."""
        if self.pool is None:
            return None
        bound = self.signature.bind(*args, **kwargs)
        self.write_keys(bound)
        hidden_NLH = next(iter(bound.arguments.values()))
        count, length = hidden_NLH.shape[:2]
        self.pool.layout.extend(self.pool.layout.first, self.positions_N1, width=self.mask_N11W.shape[3])
        for name, value in bound.arguments.items():
            bound.arguments[name] = self.pick_last(value, count=count, length=length)
        extra = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        named = "attention_mask" in self.signature.parameters
        held = bound.arguments if named or extra is None else bound.arguments.setdefault(extra, {})
        held["attention_mask"] = self.mask_N11W
        return bound.args, bound.kwargs

    def write_keys(self, given: inspect.BoundArguments) -> None:
        """Run the layer until it has written the keys and values of all tokens."""
        assert self.pool is not None
        while len(self.pool.layers) < self.number:
            self.pool.layers.append(StoppingLayer(self.pool.layout))
        last = self.pool.layers[self.number - 1]
        last.stops = True
        try:
            self.layer.forward(*given.args, **given.kwargs)
        except WrittenKeys:
            return
        finally:
            last.stops = False
        raise RuntimeError("the last layer writes no keys")

    def pick_last(self, value: Any, *, count: int, length: int) -> Any:
        """Select the last tokens [N, 1, ...] of a tensor with all tokens of the prompts [N or 1, L, ...]."""
        if isinstance(value, dict):
            return {name: self.pick_last(one, count=count, length=length) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(self.pick_last(one, count=count, length=length) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        if value.shape[0] not in (1, count):
            return value
        rows = torch.arange(count, device=value.device) if value.shape[0] == count else torch.zeros_like(self.ends_N)
        return value[rows, self.ends_N][:, None]


def last_layer(base: Any) -> tuple[nn.Module, int] | None:
    """Return a model's last layer and the number of layers; None if they cannot be identified."""
    number = int(base.config.get_text_config().num_hidden_layers)
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    kinds = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return (kinds[0][-1], number) if len(kinds) == 1 else None
