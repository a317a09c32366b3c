"""Prompts are read for the keys and values that they leave, and for the scores of what follows their last token.

The last layer therefore needs the keys of all tokens, but everything after them only for the last one. A hook before it
first lets the layer run until it has written its keys, stops it there, and then lets the last tokens alone through.
With few layers that is a good part of reading: of four, a fifth.

Shapes: N prompts, L tokens of the longest, H width.
"""

import inspect
from typing import Any

import torch
from torch import nn

from partita.lm.slot_kv_cache import SlotKVCache, SlotLayer


class WrittenKeys(Exception):  # noqa: N818 - it is no error
    """The layer has written its keys and values."""


class StoppingLayer(SlotLayer):
    """Stops the forward pass once it has written, while it is told so."""

    stops = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write, and raise Written or give what the new tokens see."""
        found = super().update(key_states, value_states, *args, **kwargs)
        if self.stops:
            raise WrittenKeys
        return found


class LastTokens:
    """Lets the last tokens of prompts through the last layer, while it is switched on."""

    def __init__(self, layer: nn.Module, *, number: int) -> None:
        """`layer` is the last of `number` layers."""
        self.layer, self.number = layer, number
        self.signature = inspect.signature(layer.forward)
        self.pool: SlotKVCache | None = None
        self.ends_N = self.positions_N1 = self.mask_N11W = torch.zeros(0)
        self.handle = layer.register_forward_pre_hook(self.narrow, with_kwargs=True)

    def aim(self, pool: SlotKVCache, ends_N: torch.Tensor, positions_N1: torch.Tensor, mask_N11W: torch.Tensor) -> None:
        """Switch it on for a pass whose last tokens are these of the L, stand there in their slots, and see W."""
        self.pool, self.ends_N, self.positions_N1, self.mask_N11W = pool, ends_N, positions_N1, mask_N11W

    def close(self) -> None:
        """Leave the layer as it was."""
        self.handle.remove()

    def narrow(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments for the last tokens, once the keys of all are written."""
        if self.pool is None:
            return None
        given = self.signature.bind(*args, **kwargs)
        self.write_keys(given)
        hidden_NLH = next(iter(given.arguments.values()))
        count, length = hidden_NLH.shape[:2]
        self.pool.place.extend(self.pool.place.first, self.positions_N1, width=self.mask_N11W.shape[3])
        for name, value in given.arguments.items():
            given.arguments[name] = self.picked(value, count=count, length=length)
        extra = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        named = "attention_mask" in self.signature.parameters
        held = given.arguments if named or extra is None else given.arguments.setdefault(extra, {})
        held["attention_mask"] = self.mask_N11W
        return given.args, given.kwargs

    def write_keys(self, given: inspect.BoundArguments) -> None:
        """Run the layer until it has written the keys and values of all tokens."""
        assert self.pool is not None
        while len(self.pool.layers) < self.number:
            self.pool.layers.append(StoppingLayer(self.pool.place))
        last = self.pool.layers[self.number - 1]
        last.stops = True
        try:
            self.layer.forward(*given.args, **given.kwargs)
        except WrittenKeys:
            return
        finally:
            last.stops = False
        raise RuntimeError("the last layer writes no keys")

    def picked(self, value: Any, *, count: int, length: int) -> Any:
        """Of a tensor with all tokens of the prompts [N or 1, L, ...], those of the last ones [N, 1, ...]."""
        if isinstance(value, dict):
            return {name: self.picked(one, count=count, length=length) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(self.picked(one, count=count, length=length) for one in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        if value.shape[0] not in (1, count):
            return value
        rows = torch.arange(count, device=value.device) if value.shape[0] == count else torch.zeros_like(self.ends_N)
        return value[rows, self.ends_N][:, None]


def last_layer(base: Any) -> tuple[nn.Module, int] | None:
    """The last of a model's layers, and how many there are; None where they cannot be told."""
    number = int(base.config.get_text_config().num_hidden_layers)
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    kinds = [found for found in lists if len({type(layer) for layer in found}) == 1]
    return (kinds[0][-1], number) if len(kinds) == 1 else None
