"""Linear layers with int8 weights and dynamic quantization of their inputs, for answers on a CPU.

A weight has one scale for each output, an input one for each row: the result of a row does not depend on the rows next
to it, so answers are the same in any batch. Products are exact sums of integers, computed by FBGEMM, which is part of
torch. On processors without VNNI instructions it adds products in pairs in 16 bits, where 255 x 127 + 255 x 127 does
not fit. There the weights take 127 of the 255 values.

Shapes: N rows, I inputs, O outputs.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from partita_trainers.torch_internals import has_int8_linear, int8_linear, pack_int8, unpack_int8, version

INPUT_LEVELS = 127
"""Largest quantized input; the kernel takes it as an unsigned number, with a zero point of 128."""
WEIGHT_LEVELS = 127
"""Largest quantized weight ..."""
WEIGHT_LEVELS_IN_PAIRS = 63
"""... and the largest where sums of two products have 16 bits."""
LEAST_SCALE = 1e-30
"""Minimum size of the largest number in a row."""

current = threading.local()


@contextmanager
def fbgemm() -> Iterator[None]:
    """Pack weights for FBGEMM in this context. Packed weights know their library afterwards."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def is_available() -> bool:
    """Return whether this build of torch and this processor compute int8 products."""
    return "fbgemm" in torch.backends.quantized.supported_engines and has_int8_linear()


@cache
def weight_levels() -> int:
    """Return the largest quantized weight with which sums are exact on this processor."""
    weight_OI, x_NI = torch.full((32, 64), WEIGHT_LEVELS).float(), torch.full((1, 64), INPUT_LEVELS).float()
    sums_NO = int8_linear(x_NI, packed(weight_OI, levels=WEIGHT_LEVELS))
    exact = bool((sums_NO == x_NI @ weight_OI.t()).all())
    return WEIGHT_LEVELS if exact else WEIGHT_LEVELS_IN_PAIRS


def packed(weight_OI: torch.Tensor, *, levels: int) -> Any:
    """Quantize a float32 weight, and return it packed for the kernel."""
    scale_O = weight_OI.abs().amax(1).clamp_min(LEAST_SCALE).double() / levels
    with fbgemm():
        return pack_int8(weight_OI, scale_O)


class ScaledRows:
    """Inputs of a layer, each row divided by its scale: integers after rounding."""

    def __init__(self, x: torch.Tensor) -> None:
        """Scale the rows of x [..., I]."""
        self.of = weakref.ref(x)
        self.version = version(x)
        self.scale = x.abs().amax(-1, keepdim=True).clamp_min_(LEAST_SCALE).mul_(1 / INPUT_LEVELS)
        self.rows = x / self.scale

    def is_of(self, x: torch.Tensor) -> bool:
        """Return whether these are the rows of x, unchanged."""
        return self.of() is x and self.version is not None and self.version == version(x)


def scaled_rows(x: torch.Tensor) -> ScaledRows:
    """Return the scaled rows of x. Layers with the same input, such as those of queries and keys, share them."""
    rows: ScaledRows | None = getattr(current, "rows", None)
    if rows is None or not rows.is_of(x):
        rows = current.rows = ScaledRows(x)
    return rows


class Int8Linear(nn.Linear):
    """A linear layer with an int8 weight."""

    packed: Any
    """The weight, packed for the kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O], in the type of x."""
        rows = scaled_rows(x.float())
        y = int8_linear(rows.rows, self.packed).mul_(rows.scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # the layer holds no float32 weight
        """The weight [O, I] in float32, computed at each access."""
        return unpack_int8(self.packed)


def to_int8(layer: nn.Linear) -> None:
    """Replace the weight of a plain float32 CPU layer by an int8 weight, in place."""
    layer_in_int8: Any = layer
    layer_in_int8.packed = packed(layer.weight.detach(), levels=weight_levels())
    del layer.weight
    layer.__class__ = Int8Linear


def int8_layers(module: nn.Module) -> list[tuple[str, Int8Linear]]:
    """Return the layers with int8 weights, by name."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, Int8Linear)]
