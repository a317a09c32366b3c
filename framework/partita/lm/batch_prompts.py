"""The prompts of a batch as transformers' `generate` takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.lm.base import GenerationRequest

Decode = Callable[[Sequence[int]], str]
"""Returns the text of the new tokens of a row, without special tokens."""


@dataclass(frozen=True)
class BatchPrompts:
    """Prompts of one call of `generate`."""

    inputs: Mapping[str, Any]
    """Keyword arguments of `generate`."""
    requests: Sequence[GenerationRequest]
    """The rows as logits processors see them: `input_ids` are the tokens before the first new one."""
    length: int
    """Positions before the first new token in the sequences that `generate` returns."""
    decode: Decode
    """Decodes new tokens."""
