"""Raw rows in, token ids out: what is done to rows a chunk at a time, here or in worker processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.ledger import UsedRows
from partita.data.reading.json_reader import json_row
from partita.data.shaping.row_tokenizer import Example, RowTokenizer
from partita_schema.errors import RowError

if TYPE_CHECKING:
    from marshmallow import Schema

    from partita.data.dialogue.expand import Expander


@dataclass(frozen=True)
class Unreadable:
    """What stands in the place of a row that could not be read."""

    reason: str
    raw: str


RawRow = bytes | Mapping[str, Any] | Unreadable
"""A row as a JSON object in UTF-8, or as a mapping."""


@dataclass(frozen=True)
class RawChunk:
    """Rows as they were read."""

    rows: Sequence[RawRow]
    keys: Sequence[str]


@dataclass(frozen=True)
class BadPlace:
    """A row of a chunk that cannot be used."""

    place: int
    reasons: tuple[str, ...]
    raw: Any
    """The row, or what stands in its place."""


@dataclass(frozen=True)
class EncodedChunk:
    """Examples of a chunk in flat arrays. A row may have given several examples, or none."""

    ids: np.ndarray
    """Token ids of all examples, one behind the other, int32."""
    lengths: np.ndarray
    """Tokens of each example, int64."""
    spans: np.ndarray
    """First learned token and the one behind the last, in the example, int32, [spans, 2]."""
    span_counts: np.ndarray
    """Learned spans of each example, int64."""
    places: np.ndarray
    """Place in the chunk of the row of each example, int64."""
    numbers: np.ndarray
    """Number of each example among those of its row, from 1, int32."""
    used: UsedRows
    """Rows of which everything is used."""
    bad: tuple[BadPlace, ...] = ()
    num_unreadable: int = 0
    """Bad rows that are no rows at all: broken lines, or JSON that is no object."""


class ChunkEncoder:
    """Checks and encodes rows. Can be sent to other processes."""

    def __init__(self, encoder: RowTokenizer, *, most_tokens: int | None = None) -> None:
        """Rows with examples of more than `most_tokens` are bad, and those examples left out."""
        self.encoder = encoder
        self.most_tokens = most_tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "most_tokens": self.most_tokens}

    @cached_property
    def schema(self) -> "Schema":
        """What a row must be."""
        from partita_schema.rows import row_schema

        return row_schema(self.encoder.formatter.config, supervised=True)

    @cached_property
    def unknown(self) -> int | None:
        """The token that stands for text that the tokenizer does not know; None where there is none.

        Byte-level tokenizers know all text: those that name an unknown token name their end token again.
        """
        tokenizer = self.encoder.formatter.tokenizer
        token: int | None = getattr(tokenizer, "unk_token_id", None)
        return None if token == getattr(tokenizer, "eos_token_id", None) else token

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """Every row is in the examples or among the bad."""
        from partita_schema.rows import check_rows

        raw, bad = parsed(chunk.rows)
        num_unreadable = len(bad)
        expander = self.encoder.expander
        made = [
            (place, number, *row)
            for place in raw
            for number, row in enumerate(made_rows(raw[place], chunk.keys[place], expander=expander), start=1)
        ]
        checked = check_rows(self.schema, [row for *_, row in made])
        bad |= {made[number][0]: reasons for number, reasons in checked.bad.items()}
        good = [made[number] for number in checked.clean]
        encoded = self.encoder.encode_rows(list(checked.clean.values()), [key for *_, key, _ in good])
        examples: list[tuple[int, int, Example]] = []
        for (place, number, *_), example in zip(good, encoded, strict=True):
            if isinstance(example, RowError):
                bad[place] = (str(example),)
            elif self.most_tokens is not None and len(example.input_ids) > self.most_tokens:
                bad.setdefault(place, (f"more than the {self.most_tokens:,} tokens of data.batching.max_tokens",))
            else:
                examples.append((place, number, example))
        found = tuple(BadPlace(place, bad[place], shown(raw.get(place, chunk.rows[place]))) for place in sorted(bad))
        return replace(flat(examples, found, unknown=self.unknown), num_unreadable=num_unreadable)


def made_rows(
    row: Mapping[str, Any], key: str, *, expander: "Expander | None"
) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """The row with its key, or the rows of a dialogue that was not expanded before."""
    return [(key, row)] if expander is None else expander.expand(row, key)


def parsed(rows: Sequence[RawRow]) -> tuple[dict[int, Mapping[str, Any]], dict[int, tuple[str, ...]]]:
    """Rows as mappings, and reasons of those that are none, by place."""
    good: dict[int, Mapping[str, Any]] = {}
    bad: dict[int, tuple[str, ...]] = {}
    for place, row in enumerate(rows):
        if isinstance(row, Unreadable):
            bad[place] = (row.reason,)
            continue
        if not isinstance(row, bytes):
            good[place] = row
            continue
        value, reason = json_row(row)
        if reason:
            bad[place] = (reason,)
        else:
            good[place] = value
    return good, bad


def shown(row: Any) -> Any:
    """A bad row as the quarantine keeps it."""
    if isinstance(row, Unreadable):
        return row.raw
    return row.decode("utf-8", "replace") if isinstance(row, bytes) else row


def flat(
    examples: Sequence[tuple[int, int, Example]], bad: tuple[BadPlace, ...], *, unknown: int | None
) -> EncodedChunk:
    """Examples with the places of their rows as arrays; `unknown` is the tokenizer's unknown token."""
    found = [example for *_, example in examples]
    used = UsedRows(
        rows=len({place for place, *_ in examples} - {row.place for row in bad}),
        cut=sum(example.cut_tokens > 0 for example in found),
        cut_tokens=sum(example.cut_tokens for example in found),
        loss_tokens=sum(end - start for example in found for start, end in example.spans),
        unknown_tokens=0
        if unknown is None
        else sum(example.input_ids[start:end].count(unknown) for example in found for start, end in example.spans),
    )
    return EncodedChunk(
        ids=np.array([token for example in found for token in example.input_ids], dtype=np.int32),
        lengths=np.array([len(example.input_ids) for example in found], dtype=np.int64),
        spans=np.array([span for example in found for span in example.spans], dtype=np.int32).reshape(-1, 2),
        span_counts=np.array([len(example.spans) for example in found], dtype=np.int64),
        places=np.array([place for place, *_ in examples], dtype=np.int64),
        numbers=np.array([number for _, number, _ in examples], dtype=np.int32),
        used=used,
        bad=bad,
    )
