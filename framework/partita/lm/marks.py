"""Marked token ids: where a head looks, within the tokens of a prompt.

A prompt is a list of token ids on its way from the tokenizer to the model. The tokens at which the head predicts, such
as the first one of each word, are marked with their own bits inverted, which makes them negative.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def with_marks(input_ids: Iterable[int], positions: Collection[int]) -> list[int]:
    """Return token ids with those at `positions` marked."""
    return [~token if index in positions else token for index, token in enumerate(input_ids)]


def without_marks(input_ids_T: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return token ids without marks, and which of them were marked, bool."""
    marked_T = input_ids_T < 0
    return input_ids_T.where(~marked_T, ~input_ids_T), marked_T
