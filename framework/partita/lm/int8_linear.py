"""Linear layers with int8 weights and dynamic quantization of their inputs, for answers on a CPU.

A weight has one scale per output and an input one scale per row, so that the result of a row does not depend on the
other rows. Products are exact sums of integers, computed by FBGEMM, which is part of torch. On processors without VNNI
instructions it adds products in pairs in 16 bits, where 255 x 127 + 255 x 127 does not fit. There, weights are
quantized to -63 ... 63.

Shapes: N rows, I inputs, O outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from partita_trainers.torch_internals import has_int8_linear, int8_linear, pack_int8, unpack_int8

INPUT_LEVELS = 127
"""Largest quantized input; the kernel takes it as an unsigned number, with a zero point of 128."""
WEIGHT_LEVELS = 127
"""Largest quantized weight if the kernel adds products in 32 bits."""
WEIGHT_LEVELS_IN_PAIRS = 63
"""Largest quantized weight if it adds pairs of products in 16 bits."""
MIN_ABSOLUTE_MAX = 1e-30
"""Lower bound of the largest absolute value in a row, which avoids a division by 0."""


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
    scale_O = weight_OI.abs().amax(1).clamp_min(MIN_ABSOLUTE_MAX).double() / levels
    with fbgemm():
        return pack_int8(weight_OI, scale_O)


class Int8Linear(nn.Linear):
    """A linear layer with an int8 weight."""

    packed: Any
    """The weight, packed for the kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O], in the type of x."""
        rows = x.float()
        scale = rows.abs().amax(-1, keepdim=True).clamp_min_(MIN_ABSOLUTE_MAX).mul_(1 / INPUT_LEVELS)
        y = int8_linear(rows / scale, self.packed).mul_(scale)
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
