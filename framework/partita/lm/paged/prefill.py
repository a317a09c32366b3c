"""Prefill of prompts into a paged cache: the tokens of all prompts in one line, without padding.

Shapes: N rows, T tokens of a pass in all rows, V vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from partita.lm.loaded_model import TextModel
from partita.lm.paged.attention import PagedAttention, attending
from partita.lm.paged.cache import PagedKVCache, PagedPass, table_of, tensor_on_device


class PromptPart(NamedTuple):
    """A part of a prompt up to its end."""

    ids: Sequence[int]
    start: int
    """Position of the first token; those before it are cached."""
    blocks: Sequence[int]
    """The blocks of the row."""

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return self.start + len(self.ids)


@torch.no_grad()
def prefill(
    lm: TextModel,
    cache: PagedKVCache,
    parts: Sequence[PromptPart],
    *,
    attention: PagedAttention,
    width: int,
) -> torch.Tensor:
    """Write parts of prompts to the cache; return the logits after the last token of each [N, V].

    Args:
        lm: The model.
        cache: Its cache.
        parts: The parts.
        attention: How the model attends to the cache.
        width: Most blocks of a row.
    """
    size, device = attention.block_tokens, lm.device
    cells = [(part, position) for part in parts for position in range(part.start, part.length)]
    ids = [token for part in parts for token in part.ids]
    positions = [position for _, position in cells]
    written = [part.blocks[position // size] * size + position % size for part, position in cells]
    given_3T = tensor_on_device([ids, positions, written], device=device)
    starts = [0, *accumulate(len(part.ids) for part in parts)]
    ends_N = tensor_on_device([end - 1 for end in starts[1:]], device=device)
    now = PagedPass(
        table_of([part.blocks for part in parts], width=width, device=device),
        tensor_on_device([part.length for part in parts], device=device, dtype=torch.int32),
        tensor_on_device(starts, device=device, dtype=torch.int32),
        given_3T[2],
        [(len(part.ids), part.length) for part in parts],
    )
    with attending(lm.base, cache, attention, now), lm.positions.only(ends_N):
        logits: torch.Tensor = lm.base(
            input_ids=given_3T[:1], position_ids=given_3T[1:2], past_key_values=cache, use_cache=True
        ).logits
    return logits[0] if lm.positions.attached else logits[0, ends_N]
