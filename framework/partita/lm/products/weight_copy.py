"""Copies of weights in a layout that products read faster, for models on a CPU that are not trained.

oneDNN and MKL rearrange a plain weight in every product, which takes as long as the product if there are few rows. For
a single row, a packed layer in bfloat16 is up to three times as fast. The plain weight stays, for saving and for what
needs the sums of torch.
"""

from typing import Any

import torch
from torch import nn

from partita.lm.products.product import Implementation
from partita_trainers.libraries.torch_internals import version


class WeightCopy:
    """A copy of a weight [outputs, inputs] for an implementation. Copies of its layer are without it."""

    def __init__(self, weight: torch.Tensor, implementation: Implementation) -> None:
        self.weight, self.identity = weight, identity_of(weight)
        self.implementation = implementation
        self.tensor = implementation.copy(weight)

    def is_current(self, weight: torch.Tensor, implementation: Implementation) -> bool:
        """Return whether this is a copy of the weight as it is now, for this implementation."""
        same = weight is self.weight and identity_of(weight) == self.identity
        return same and implementation is self.implementation

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: torch can do neither with packed weights."""
        return type(None), ()


def identity_of(weight: torch.Tensor) -> tuple[int, int]:
    """Return two numbers of which one changes when a weight is changed in place, or moved.

    A change through `weight.data` that leaves the memory where it is, such as a merge by peft, is not seen.
    """
    return version(weight), weight.data_ptr()


class CopyingLinear(nn.Linear):
    """A linear layer that may have a copy of its weight."""

    copied: WeightCopy | None = None

    def weight_for(self, implementation: Implementation) -> torch.Tensor:
        """Return the weight as an implementation needs it.

        A copy is made in the first call, and again after the weight was changed.
        """
        if not implementation.copies_weights:
            return self.weight
        if self.copied is None or not self.copied.is_current(self.weight, implementation):
            self.copied = WeightCopy(self.weight, implementation)
        return self.copied.tensor
