"""Copies of weights in oneDNN's own layout, for models on a CPU that are not trained.

oneDNN rearranges a plain weight in every product. With few rows that takes as long as the product: a layer in bfloat16
is up to three times as fast for a single row. The plain weight stays, for saving and for what needs the sums of torch.

Shapes: N rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import nn

from partita_trainers.torch_internals import onednn_linear, pack_for_onednn, version

LAYOUT_ROWS = 64
"""Number of rows for whose products weights are packed. From four rows on, the layout is as good for other numbers."""
MOST_PACKED = 1 / 8
"""Maximum share of the free memory for packed weights. Each process of a job has its own."""


class PackedWeight:
    """A copy of a weight in oneDNN's layout. Copies of its layer are without it."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self.weight_OI, self.state = weight_OI, state(weight_OI)
        self.tensor = pack_for_onednn(weight_OI, rows=LAYOUT_ROWS)

    def is_of(self, weight_OI: torch.Tensor) -> bool:
        """Return whether this is a copy of the weight as it is now."""
        return weight_OI is self.weight_OI and state(weight_OI) == self.state

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: torch can do neither with the tensor."""
        return type(None), ()


def state(weight_OI: torch.Tensor) -> tuple[int, int]:
    """Return two numbers of which one changes when a weight is changed in place, or moved."""
    return version(weight_OI), weight_OI.data_ptr()


def packed_or_plain(packed: PackedWeight | None, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the packed weight, or the plain one if that was changed after it was packed."""
    return packed.tensor if packed is not None and packed.is_of(weight_OI) else weight_OI


class PackedLinear(nn.Linear):
    """A linear layer in bfloat16 whose weight is packed in the first pass without gradients.

    torch computes such layers with oneDNN too, so results are the same bit for bit.
    """

    packed: PackedWeight | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        if torch.is_grad_enabled() or x.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            return nn.functional.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = PackedWeight(self.weight)
        return onednn_linear(x, packed_or_plain(self.packed, self.weight), self.bias)
