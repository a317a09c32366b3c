"""Attention spans of the layers of a model: full, sliding-window or chunked attention.

Models with several types of layers take an attention mask for each type, by transformers' name of the type.

Shapes: N rows, L tokens of a pass, W positions that are attended to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

NAMES = ("sliding_window", "attention_chunk_size")
"""Config keys with the number of tokens of a window and of a chunk."""


class AttentionSpan(NamedTuple):
    """What a layer attends to."""

    window: int | None = None
    """Number of last tokens, with the token itself; None for all."""
    chunk: int | None = None
    """Number of tokens of the chunks; None for one chunk."""

    def is_exceeded_by(self, tokens: int) -> bool:
        """Return whether some tokens of a row of this length do not attend to all earlier ones."""
        return any(size is not None and tokens > size for size in self)

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Return whether each query attends to each earlier key; None if all do.

        Args:
            queries: Positions of the queries, to be broadcast with those of the keys.
            keys: Positions of the keys.
        """
        seen = queries - keys < self.window if self.window is not None else None
        if self.chunk is not None:
            same = queries // self.chunk == keys // self.chunk
            seen = same if seen is None else seen & same
        return seen


def spans_of(config: Any) -> dict[str | None, AttentionSpan]:
    """Return what each type of layer attends to; the only key is None if the layers have no types.

    Args:
        config: Config of the text model.
    """
    window, chunk = (getattr(config, name, None) or None for name in NAMES)
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or [None])
    return {
        kind: AttentionSpan(
            window if kind in (None, "sliding_attention") else None,
            chunk if kind in (None, "chunked_attention") else None,
        )
        for kind in kinds
    }


def smallest_span(config: Any) -> int | None:
    """Return the number of tokens up to which all layers attend to all earlier tokens; None if they always do."""
    return min((size for span in spans_of(config).values() for size in span if size is not None), default=None)


@contextmanager
def window_set_to(config: Any, tokens: int) -> Iterator[None]:
    """Set the windows and chunks of a model to this number of tokens in this context."""
    before = {name: size for name in NAMES if (size := getattr(config, name, None))}
    try:
        for name in before:
            setattr(config, name, tokens)
        yield
    finally:
        for name, size in before.items():
            setattr(config, name, size)


Mask = torch.Tensor | dict[str | None, torch.Tensor]
"""An additive attention mask [N, 1, L, W], or one for each type of layer."""


class SlotMasks:
    """Attention masks of rows in slots."""

    def __init__(self, config: Any, *, tokens: int) -> None:
        """Prepare masks.

        Args:
            config: Config of the text model.
            tokens: Maximum length of a row.
        """
        kinds: Sequence[str | None] = getattr(config, "layer_types", None) or [None]
        self.last_kind = kinds[-1]
        """Type of the last layer."""
        found = spans_of(config)
        exceeded = any(span.is_exceeded_by(tokens) for span in found.values())
        self.spans: Mapping[str | None, AttentionSpan] = found if exceeded else {None: AttentionSpan()}
        self.tokens = tokens
        self.nothing_hidden: torch.Tensor | None = None
        """Mask of a token that attends to all tokens of a slot."""

    def are_needed_for(self, tokens: int) -> bool:
        """Return whether a causal mask is wrong for rows of this length."""
        return any(span.is_exceeded_by(tokens) for span in self.spans.values())

    def of(self, positions_NL: torch.Tensor, *, width: int, dtype: torch.dtype) -> Mask:
        """Return the mask of a pass.

        Args:
            positions_NL: Positions of the tokens of the pass.
            width: Number of positions that are attended to.
            dtype: Type of the mask.
        """
        keys_W, queries_NL1 = torch.arange(width, device=positions_NL.device), positions_NL[:, :, None]
        masks = {}
        for kind, span in self.spans.items():
            hidden_NLW = keys_W > queries_NL1
            if (seen_NLW := span.visible(queries_NL1, keys_W)) is not None:
                hidden_NLW |= ~seen_NLW
            zeros = torch.zeros(hidden_NLW.shape, dtype=dtype, device=positions_NL.device)
            masks[kind] = zeros.masked_fill_(hidden_NLW, -torch.inf)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def of_last_token(self, position_11: torch.Tensor, *, width: int, dtype: torch.dtype) -> Mask:
        """Return the mask for the last token of a single row, which is computed only if there are windows.

        Args:
            position_11: Position of the token.
            width: Length of the row.
            dtype: Type of the mask.
        """
        if any(span != AttentionSpan() for span in self.spans.values()):
            return self.of(position_11, width=width, dtype=dtype)
        if self.nothing_hidden is None:
            self.nothing_hidden = torch.zeros((1, 1, 1, self.tokens), dtype=dtype, device=position_11.device)
        return self.nothing_hidden[..., :width]

    def of_last_layer(self, mask: Mask) -> torch.Tensor:
        """Return the mask of the last layer."""
        return mask[self.last_kind] if isinstance(mask, dict) else mask
