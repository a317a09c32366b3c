"""Attention of single new tokens to slots, for CPUs.

The sdpa kernel processes one head of one row at a time, and for a single token most of that is overhead. Here rows are
grouped by similar length. In float32, all groups are multiplied by `partita.lm.slots.decode_products`; in bfloat16, the
kernel processes all query heads of a key head at a time. The shared prefix is stored in the first slot only, and all
rows attend to it in one matrix product (Juravsky et al. 2024, "Hydragen", section 3.1). Prefill uses the sdpa kernel,
and so does a single row, for which the kernel is three times as fast.

Shapes: N rows, H key/value heads, G query heads per key/value head, W tokens, P prefix tokens, D head size.
"""

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from partita.lm.slots.cheapest_split import cheapest_split
from partita.lm.slots.decode_products import DecodePass, SlotSpan, decode_products
from partita.lm.slots.kv_cache import CacheLayout
from partita.lm.transformers_internals import ATTENTION, attention_of, attention_settings

NAME = "partita_slots"
CHUNK_ROWS = 8
"""Rows are split into chunks of multiples of this number."""
CHUNK_POSITIONS = 200
"""Positions of a row that are attended to in the time that one more chunk takes, for a small model."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of models whose attention is replaced."""

current = threading.local()


def attends(base: Any) -> bool:
    """Return whether a model's attention can be replaced."""
    return attention_of(base.config) == "sdpa" and base.device.type == "cpu" and base.dtype in DTYPES


class SlotAttention:
    """Context in which a model uses this attention for slots."""

    def __init__(self, base: Any, layout: CacheLayout) -> None:
        """Prepare the context.

        Args:
            base: The model, which supports it (`attends`).
            layout: Where passes write, and what they attend to.
        """
        self.layout = layout
        self.settings = attention_settings(base.config)
        self.before = [settings[ATTENTION] for settings in self.settings]

    def __enter__(self) -> None:
        current.layout = self.layout
        for settings in self.settings:
            settings[ATTENTION] = NAME

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for settings, before in zip(self.settings, self.before, strict=True):
            settings[ATTENTION] = before
        current.layout = None


def slot_attention(
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
        query: Queries [N, H * G, L, D].
        key: Keys [N, H, W, D].
        value: Values [N, H, W, D].
        attention_mask: Additive mask [N, 1, L, W], or None outside of slots.
        dropout: Dropout probability, used outside of slots only.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        kwargs: Passed to the sdpa function outside of slots; `sliding_window` is the window of the layer, in tokens.
    """
    layout: CacheLayout | None = getattr(current, "layout", None)
    if layout is None or attention_mask is None or kwargs.get("position_bias") is not None:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if layout.positions_NL is None or query.shape[2] > 1:
        return attend_prompts(layout, query, key, value, attention_mask, scaling), None
    rows, heads, _, size = key.shape
    window = kwargs.get("sliding_window")
    if rows == 1:
        return attend_row(layout, query, key, value, attention_mask, scaling, window), None
    found_NHGD = attend_rows(layout, query.reshape(rows, heads, -1, size), key, value, attention_mask, scaling, window)
    return found_NHGD.reshape(rows, 1, -1, value.shape[3]), None


def attend_rows(
    layout: CacheLayout,
    query_NHGD: torch.Tensor,
    key_NHWD: torch.Tensor,
    value_NHWD: torch.Tensor,
    mask_N11W: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output of single tokens of several rows [N, H, G, D].

    Args:
        layout: What the pass attends to.
        query_NHGD: Queries.
        key_NHWD: Keys.
        value_NHWD: Values.
        mask_N11W: Additive mask.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        window: Window of the layer in tokens; None if it has none.
    """
    spans = [
        SlotSpan(slice(start, end), slice(max(layout.prefix, layout.first_seen(start, end, window)), width))
        for start, end, width in layout.chunks
    ]
    has_prefix = layout.prefix > layout.first_seen(0, len(query_NHGD), window)
    if key_NHWD.dtype != torch.float32 and not has_prefix:
        return attend_groups(query_NHGD, key_NHWD, value_NHWD, mask_N11W, scaling, spans=spans)
    query_NHGD = query_NHGD * (query_NHGD.shape[3] ** -0.5 if scaling is None else scaling)
    products = decode_products(DecodePass(layout, spans, key_NHWD, value_NHWD, mask_N11W, query_NHGD.shape[2]))
    scores = products.scores(query_NHGD)
    if not has_prefix:
        return products.output([part.softmax(-1) for part in scores])
    common = SharedPrefix(query_NHGD, *beginning(layout, key_NHWD, value_NHWD), mask_N11W if window else None)
    shares = [common.shares(part, span.rows) for part, span in zip(scores, spans, strict=True)]
    return products.output(shares) + common.output()


def attend_groups(
    query_NHGD: torch.Tensor,
    key_NHWD: torch.Tensor,
    value_NHWD: torch.Tensor,
    mask_N11W: torch.Tensor,
    scaling: float | None,
    *,
    spans: Sequence[SlotSpan],
) -> torch.Tensor:
    """Return the attention output of single tokens [N, H, G, D] in bfloat16.

    The query heads of a key head are the queries of the sdpa kernel, which then reads keys and values once for all of
    them, and adds up in float32.

    Args:
        query_NHGD: Queries.
        key_NHWD: Keys.
        value_NHWD: Values.
        mask_N11W: Additive mask.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        spans: The rows and their positions.
    """
    parts = []
    for rows, own in spans:
        mask_N1GW = mask_N11W[rows, :, :, own].expand(-1, -1, query_NHGD.shape[2], -1)
        keys, values = key_NHWD[rows, :, own], value_NHWD[rows, :, own]
        parts.append(scaled_dot_product_attention(query_NHGD[rows], keys, values, attn_mask=mask_N1GW, scale=scaling))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_prompts(
    layout: CacheLayout,
    query_NHLD: torch.Tensor,
    key_NHWD: torch.Tensor,
    value_NHWD: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention output of prompt tokens [N, L, H * G, D].

    The shared prefix is prepended to a few rows at a time, which limits the memory of the copy.

    Args:
        layout: Where the pass writes, and what it attends to.
        query_NHLD: Queries of all query heads.
        key_NHWD: Keys.
        value_NHWD: Values.
        mask: Additive mask [N or 1, 1, L, W].
        scaling: Factor of the scores; None for 1 / sqrt(D).
    """
    apart = layout.prefix_in_first_slot and layout.prefix > 0
    rows = max(1, layout.copied_tokens // key_NHWD.shape[2]) if apart else len(query_NHLD)
    parts = []
    for start in range(0, len(query_NHLD), rows):
        part = slice(start, start + rows)
        keys, values = key_NHWD[part], value_NHWD[part]
        if apart:
            keys, values = with_prefix(layout, keys, values)
        # Without grouping, sdpa would copy keys and values once per query head.
        grouped = query_NHLD.shape[1] != keys.shape[1]
        seen = mask if len(mask) == 1 else mask[part]
        parts.append(
            scaled_dot_product_attention(
                query_NHLD[part], keys, values, attn_mask=seen, scale=scaling, enable_gqa=grouped
            )
        )
    found_NHLD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found_NHLD.transpose(1, 2).contiguous()


def attend_row(
    layout: CacheLayout,
    query_1HD: torch.Tensor,
    key_1HWD: torch.Tensor,
    value_1HWD: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the attention output of a token of a single row [1, 1, H * G, D].

    Args:
        layout: Where the pass writes, and what it attends to.
        query_1HD: Queries of all query heads, [1, H * G, 1, D].
        key_1HWD: Keys.
        value_1HWD: Values.
        mask: Additive mask [1, 1, 1, W].
        scaling: Factor of the scores; None for 1 / sqrt(D).
        window: Window of the layer in tokens; None if it has none.
    """
    if layout.first and layout.prefix_in_first_slot and layout.prefix:
        key_1HWD, value_1HWD = with_prefix(layout, key_1HWD, value_1HWD)
    if start := layout.first_seen(0, 1, window):
        key_1HWD, value_1HWD, mask = key_1HWD[:, :, start:], value_1HWD[:, :, start:], mask[..., start:]
    found_1HD = scaled_dot_product_attention(
        query_1HD,
        key_1HWD,
        value_1HWD,
        attn_mask=mask,
        scale=scaling,
        enable_gqa=query_1HD.shape[1] != key_1HWD.shape[1],
    )
    return found_1HD.transpose(1, 2)


def with_prefix(
    layout: CacheLayout, key_NHWD: torch.Tensor, value_NHWD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of keys and values of rows with the shared prefix, which is stored in the first slot only."""
    keys, values = (
        torch.cat([common_HPD.expand(len(own), -1, -1, -1), own[:, :, layout.prefix :]], dim=2)
        for common_HPD, own in zip(beginning(layout, key_NHWD, value_NHWD), (key_NHWD, value_NHWD), strict=True)
    )
    return keys, values


def beginning(
    layout: CacheLayout, key_NHWD: torch.Tensor, value_NHWD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the shared prefix [H, P, D], of the layer written last or of the first row."""
    if layout.prefix_in_first_slot and layout.layer is not None:
        key_NHWD, value_NHWD = layout.layer.keys, layout.layer.values
    return key_NHWD[0, :, : layout.prefix], value_NHWD[0, :, : layout.prefix]


class SharedPrefix:
    """Attention of all rows to the P shared prefix tokens, in two matrix products per head."""

    def __init__(
        self,
        query_NHGD: torch.Tensor,
        key_HPD: torch.Tensor,
        value_HPD: torch.Tensor,
        mask_N11W: torch.Tensor | None,
    ) -> None:
        """Compute the scores of all rows for the prefix.

        Args:
            query_NHGD: Queries.
            key_HPD: Keys of the prefix.
            value_HPD: Values of the prefix.
            mask_N11W: Additive mask of the pass; None if all rows see the whole prefix.
        """
        self.rows, self.heads, self.group, _ = query_NHGD.shape
        tokens = key_HPD.shape[1]
        self.tokens, self.value_HPD = tokens, value_HPD
        query_HND = query_NHGD.transpose(0, 1).reshape(self.heads, self.rows * self.group, -1)
        scores_HNP = torch.bmm(query_HND, key_HPD.transpose(1, 2))
        self.scores_NHGP = scores_HNP.view(self.heads, self.rows, self.group, tokens).transpose(0, 1)
        if mask_N11W is not None:
            self.scores_NHGP = self.scores_NHGP + mask_N11W[..., :tokens]
        self.shares_HNGP = torch.empty_like(scores_HNP).view(self.heads, self.rows, self.group, tokens)

    def shares(self, scores_NHGW: torch.Tensor, chunk: slice) -> torch.Tensor:
        """Return the attention weights of a chunk for its own tokens; keep those for the prefix."""
        shares = torch.cat([self.scores_NHGP[chunk], scores_NHGW], dim=-1).softmax(-1)
        self.shares_HNGP[:, chunk] = shares[..., : self.tokens].transpose(0, 1)
        return shares[..., self.tokens :]

    def output(self) -> torch.Tensor:
        """Return the output of all rows from the values of the prefix [N, H, G, D]."""
        taken_HND = torch.bmm(self.shares_HNGP.flatten(1, 2), self.value_HPD)
        return taken_HND.view(self.heads, self.rows, self.group, -1).transpose(0, 1)


def chunks(lengths: list[int]) -> list[tuple[int, int, int]]:
    """Split rows into consecutive chunks so that they take the least time; return first row, end and longest of each.

    A row is attended to up to the length of the longest row of its chunk, and each chunk takes some time itself.
    """
    shortest = min(lengths)
    parts = split_rows(tuple(length - shortest for length in lengths))
    return [(start, end, max(lengths[start:end])) for start, end in parts]


@lru_cache(maxsize=1)
def split_rows(more: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first row and the end of each chunk.

    With one more token in every row, each split takes the same time longer. So the best one depends on differences of
    lengths only, and stays the same from step to step until a row ends or begins.

    Args:
        more: Tokens of each row beyond the shortest one.
    """
    if len(more) <= CHUNK_ROWS:
        return [(0, len(more))]
    starts = range(0, len(more), CHUNK_ROWS)
    ends = [*starts[1:], len(more)]
    longest = [max(more[start:end]) for start, end in zip(starts, ends, strict=True)]

    def spans(one: int) -> Iterator[tuple[int, float]]:
        widths = accumulate(longest[one:], max)
        return (
            (end, CHUNK_POSITIONS + (ends[end - 1] - starts[one]) * width) for end, width in enumerate(widths, one + 1)
        )

    parts = cheapest_split(len(starts), spans)
    return [(starts[one], ends[end - 1]) for one, end in parts]


AttentionInterface.register(NAME, slot_attention)
