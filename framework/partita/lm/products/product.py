"""Ways to compute the products of linear layers on a CPU.

Shapes: N rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import torch
from torch import nn

from partita_trainers.libraries.torch_internals import onednn_linear, pack_for_onednn

LAYOUT_ROWS = 64
"""Number of rows for whose products weights are packed. From four rows on, the layout is as good for other numbers."""


class Implementation(StrEnum):
    """A way to compute the outputs of a layer."""

    TORCH = "torch"
    """torch's choice: MKL in float32, oneDNN in bfloat16."""
    BY_COLUMN = "by column"
    """torch's choice with a copy of the weights that is stored by column, as the product reads it."""
    ONEDNN = "onednn"
    """oneDNN with plain weights."""
    PACKED = "packed"
    """oneDNN with a copy of the weights in its own layout."""

    @property
    def copies_weights(self) -> bool:
        """Whether it needs a copy of the weights."""
        return self in (Implementation.BY_COLUMN, Implementation.PACKED)

    @property
    def is_onednn(self) -> bool:
        """Whether oneDNN is called directly, which compiles a kernel for each number of rows."""
        return self in (Implementation.ONEDNN, Implementation.PACKED)

    def copy(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return a copy of a weight for `multiply`, or the weight itself if none is needed."""
        if self is Implementation.PACKED:
            return pack_for_onednn(weight_OI, rows=LAYOUT_ROWS)
        if self is Implementation.BY_COLUMN:
            return weight_OI.detach().t().contiguous().t()
        return weight_OI

    def multiply(self, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b [..., O].

        Args:
            x: Inputs [..., I].
            weight_OI: The result of `copy`.
            bias_O: Bias, or None.
        """
        if self.is_onednn:
            return onednn_linear(x, weight_OI, bias_O)
        return nn.functional.linear(x, weight_OI, bias_O)


class Product(StrEnum):
    """A product of a linear layer y = x W^T in training."""

    OUTPUT = "output"
    """x [N, I] by W [O, I]: y."""
    INPUT_GRADIENT = "input gradient"
    """dy [N, O] by W: dx."""
    WEIGHT_GRADIENT = "weight gradient"
    """dy by x: dW."""


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TORCH: Mapping[Product, Multiply] = {
    Product.OUTPUT: Implementation.TORCH.multiply,
    Product.INPUT_GRADIENT: lambda dy_NO, weight_OI: dy_NO @ weight_OI,
    Product.WEIGHT_GRADIENT: lambda dy_NO, x_NI: dy_NO.t() @ x_NI,
}
ONEDNN: Mapping[Product, Multiply] = {
    Product.OUTPUT: Implementation.ONEDNN.multiply,
    Product.INPUT_GRADIENT: lambda dy_NO, weight_OI: onednn_linear(dy_NO, weight_OI.t(), None),
    Product.WEIGHT_GRADIENT: lambda dy_NO, x_NI: onednn_linear(dy_NO.t(), x_NI.t(), None),
}
