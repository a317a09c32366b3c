"""Attention to a paged KV cache: the interface, and a reference in plain torch that runs on every device.

The tokens of a pass are in one line, row after row. A token attends to the tokens of its row up to itself, in layers
with a sliding window to the last ones of them.

Shapes: T tokens of a pass in all rows, N rows, M blocks of a row, W = M * K tokens, P blocks of the pool, K tokens of a
block, L tokens of a pass in one row, H key/value heads, G query heads per key/value head, D head size.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from partita.lm.paged.cache import PagedKVCache, PagedPass
from partita.lm.transformers_internals import attention_of, set_attention

NAME = "partita_paged"
BLOCK_TOKENS = 16
"""Tokens of a block for the reference."""

current = threading.local()


class Scoring(NamedTuple):
    """How a layer scores tokens."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Number of last tokens that are attended to; None for all."""
    softcap: float | None = None
    """Limit of the scores (Gemma 2); None without limit."""
    sinks: torch.Tensor | None = None
    """Score of attending to nothing, one for each query head (GPT-OSS); None without it."""


class PagedAttention(Protocol):
    """Attention of the tokens of a pass to the blocks of their rows."""

    block_tokens: int
    """Tokens of a block."""

    def __call__(
        self,
        query_THD: torch.Tensor,
        keys_PKHD: torch.Tensor,
        values_PKHD: torch.Tensor,
        now: PagedPass,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Return the output of all tokens [T, H * G, D].

        Args:
            query_THD: Queries of all query heads.
            keys_PKHD: Keys of the layer.
            values_PKHD: Values of the layer.
            now: The pass.
            scoring: How the layer scores tokens.
        """

    def open(self) -> None:
        """Prepare the process for this implementation."""

    def close(self) -> None:
        """Undo `open`."""


class ReferenceAttention:
    """Attention to copies of the blocks of each row, in torch's own operations."""

    block_tokens = BLOCK_TOKENS

    def __call__(
        self,
        query_THD: torch.Tensor,
        keys_PKHD: torch.Tensor,
        values_PKHD: torch.Tensor,
        now: PagedPass,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Return the output of all tokens [T, H * G, D]; see `PagedAttention`."""
        if now.parts is None:
            keys_NHWD, values_NHWD = (gathered(pool, now.tables_NM) for pool in (keys_PKHD, values_PKHD))
            ends_N1 = now.lengths_N[:, None]
            seen_N1W = visible(ends_N1 - 1, width=keys_NHWD.shape[2], window=scoring.window)
            return attend(query_THD[:, :, None], keys_NHWD, values_NHWD, seen_N1W, scoring)[:, :, 0]
        found, start = [], 0
        for row, (tokens, length) in enumerate(now.parts):
            used = -(-length // self.block_tokens)
            keys_1HWD, values_1HWD = (
                gathered(pool, now.tables_NM[row : row + 1, :used])[:, :, :length] for pool in (keys_PKHD, values_PKHD)
            )
            positions_1L = torch.arange(length - tokens, length, device=query_THD.device)[None]
            seen_1LW = visible(positions_1L, width=length, window=scoring.window)
            query_1HLD = query_THD[start : start + tokens].transpose(0, 1)[None]
            found.append(attend(query_1HLD, keys_1HWD, values_1HWD, seen_1LW, scoring)[0].transpose(0, 1))
            start += tokens
        return torch.cat(found)

    def open(self) -> None:
        """Do nothing: the reference needs nothing."""

    def close(self) -> None:
        """Do nothing."""


def gathered(pool_PKHD: torch.Tensor, tables_NM: torch.Tensor) -> torch.Tensor:
    """Return the blocks of each row, one after the other [N, H, W, D]."""
    return pool_PKHD[tables_NM].flatten(1, 2).transpose(1, 2)


def visible(positions_NL: torch.Tensor, *, width: int, window: int | None) -> torch.Tensor:
    """Return which of the first `width` tokens of a row the tokens at these positions attend to [N, L, W]."""
    keys_W, queries_NL1 = torch.arange(width, device=positions_NL.device), positions_NL[:, :, None]
    seen_NLW = keys_W <= queries_NL1
    return seen_NLW if window is None else seen_NLW & (queries_NL1 - keys_W < window)


def attend(
    query_NHLD: torch.Tensor,
    keys_NHWD: torch.Tensor,
    values_NHWD: torch.Tensor,
    seen_NLW: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention output [N, H * G, L, D].

    Args:
        query_NHLD: Queries of all query heads.
        keys_NHWD: Keys of all key/value heads.
        values_NHWD: Values of all key/value heads.
        seen_NLW: Which tokens are attended to.
        scoring: How the layer scores tokens.
    """
    seen_N1LW = seen_NLW[:, None]
    if scoring.softcap is None and scoring.sinks is None:
        grouped = query_NHLD.shape[1] != keys_NHWD.shape[1]
        if grouped and query_NHLD.shape[2] == 1:
            # On a GPU the fast kernels take no mask with grouped heads. The heads of a group become tokens of one head.
            query_NHGD = query_NHLD.reshape(len(query_NHLD), keys_NHWD.shape[1], -1, query_NHLD.shape[3])
            found_NHGD = scaled_dot_product_attention(
                query_NHGD, keys_NHWD, values_NHWD, attn_mask=seen_N1LW, scale=scoring.scale
            )
            return found_NHGD.flatten(1, 2).unsqueeze(2)
        return scaled_dot_product_attention(
            query_NHLD, keys_NHWD, values_NHWD, attn_mask=seen_N1LW, scale=scoring.scale, enable_gqa=grouped
        )
    group = query_NHLD.shape[1] // keys_NHWD.shape[1]
    keys_NHWD, values_NHWD = (held.repeat_interleave(group, dim=1) for held in (keys_NHWD, values_NHWD))
    scores_NHLW = query_NHLD @ keys_NHWD.transpose(2, 3) * scoring.scale
    if scoring.softcap is not None:
        scores_NHLW = torch.tanh(scores_NHLW / scoring.softcap) * scoring.softcap
    scores_NHLW = scores_NHLW.masked_fill(~seen_N1LW, -torch.inf)
    if scoring.sinks is not None:
        sinks_NHL1 = scoring.sinks.to(scores_NHLW.dtype).view(1, -1, 1, 1).expand(*scores_NHLW.shape[:3], 1)
        scores_NHLW = torch.cat([scores_NHLW, sinks_NHL1], dim=-1)
    shares_NHLW = scores_NHLW.softmax(-1, dtype=torch.float32).to(values_NHWD.dtype)
    return shares_NHLW[..., : values_NHWD.shape[2]] @ values_NHWD


@contextmanager
def attending(base: Any, cache: PagedKVCache, attention: PagedAttention, now: PagedPass) -> Iterator[None]:
    """Use the paged cache for the forward passes in this context.

    Args:
        base: The model.
        cache: The cache that is passed to it.
        attention: How it attends to the cache.
        now: The pass.
    """
    before = attention_of(base.config)
    current.attention, current.now = attention, now
    # transformers' function for sdpa ignores the limit of the scores.
    current.keeps_softcap = before != "sdpa"
    # Some layers keep the window of their config when they are built, and masks follow the config.
    current.window = getattr(base.config.get_text_config(), "sliding_window", None)
    cache.size.now = now
    set_attention(base.config, NAME)
    try:
        yield
    finally:
        set_attention(base.config, before)
        cache.size.now = None
        current.attention = current.now = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the interface of transformers' attention functions.

    Args:
        module: The attention layer.
        query: Queries [rows, H * G, tokens, D].
        key: The keys of the pool [P, K, H, D].
        value: The values of the pool [P, K, H, D].
        attention_mask: A mask, used outside of `attending` only.
        dropout: Dropout probability, used outside of `attending` only.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        kwargs: `sliding_window`, `softcap` and `s_aux` of the layer.
    """
    now: PagedPass | None = getattr(current, "now", None)
    if now is None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    rows, heads, tokens, size = query.shape
    scoring = Scoring(
        size**-0.5 if scaling is None else scaling,
        None if kwargs.get("sliding_window") is None else current.window,
        kwargs.get("softcap") if current.keeps_softcap else None,
        kwargs.get("s_aux"),
    )
    query_THD = query.transpose(1, 2).reshape(rows * tokens, heads, size)
    found_THD = current.attention(query_THD, key, value, now, scoring)
    return found_THD.reshape(rows, tokens, heads, -1), None


AttentionInterface.register(NAME, paged_attention)
