"""Numbers that say which texts of a step are equal, as targets of an embedding.

A text may be cut to the context, so its tokens do not say whether two texts are equal. Targets are float32, which holds
whole numbers of 24 bits: a text has two of them, and two different texts are equal with a probability of 2^-48.

Shapes: N texts.
"""

from typing import TYPE_CHECKING

from partita_schema.common.hashing import hash_to_int

if TYPE_CHECKING:
    import torch

BITS = 24
"""Bits of a whole number that float32 holds."""


def identity_of(text: str) -> tuple[float, float]:
    """Return the two numbers of a text."""
    number = hash_to_int(text, num_bytes=2 * BITS // 8)
    return float(number >> BITS), float(number % (1 << BITS))


def numbers_of(targets_N2: "torch.Tensor") -> "torch.Tensor":
    """Return one number for each text, int64 [N], from the two of `identity_of`, float32."""
    return (targets_N2[:, 0].long() << BITS) + targets_N2[:, 1].long()
