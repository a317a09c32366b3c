"""The prompts of a batch as transformers' `generate` takes them: B rows, T tokens of the longest one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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


def right_padded(requests: Sequence[GenerationRequest], *, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, T], padded on the right, and the lengths of the rows [B], on the CPU."""
    lengths = [len(request.input_ids) for request in requests]
    ids_BT = np.full((len(lengths), max(lengths)), pad_token_id, dtype=np.int64)
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        ids_BT[row, :length] = request.input_ids
    return torch.from_numpy(ids_BT), torch.tensor(lengths)
