"""Copies of weights in oneDNN's own layout, for models on a CPU that are not trained.

oneDNN rearranges a plain weight in every product, which takes as long as the product if there are few rows. For a
single row, a packed layer in bfloat16 is up to three times as fast. The plain weight stays, for saving and for what
needs the sums of torch.
"""

from typing import Any

import torch
from torch import nn

from partita_trainers.torch_internals import pack_for_onednn, version

LAYOUT_ROWS = 64
"""Number of rows for whose products weights are packed. From four rows on, the layout is as good for other numbers."""


class PackedWeight:
    """A copy of a weight [outputs, inputs] in oneDNN's layout. Copies of its layer are without it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.identity = weight, identity_of(weight)
        self.tensor = pack_for_onednn(weight, rows=LAYOUT_ROWS)

    def is_current(self, weight: torch.Tensor) -> bool:
        """Return whether this is a copy of the weight as it is now."""
        return weight is self.weight and identity_of(weight) == self.identity

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: torch can do neither with the tensor."""
        return type(None), ()


def identity_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return two numbers of which one changes when a weight is changed in place, or moved.

    A change through `weight.data` that leaves the memory where it is, such as a merge by peft, is not seen.
    """
    return version(weight), weight.data_ptr()


class PackableLinear(nn.Linear):
    """A linear layer that may have a packed copy of its weight."""

    packed: PackedWeight | None = None

    def pack(self) -> torch.Tensor:
        """Return the packed weight. It is computed in the first call, and again after the weight was changed."""
        if self.packed is None or not self.packed.is_current(self.weight):
            self.packed = PackedWeight(self.weight)
        return self.packed.tensor
