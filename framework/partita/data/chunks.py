"""Validate and tokenize raw rows in chunks, in this process or in workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.formats.json import json_row
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.data.ledger import UsedRows
from partita_schema.errors import RowError

if TYPE_CHECKING:
    from partita.data.dialogue import Expander
    from partita_schema.rows import RowSchema


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for a row that could not be read."""

    reason: str
    raw: str


RawRow = bytes | Mapping[str, Any] | Unreadable
"""A row as a JSON object in UTF-8, as a mapping, or a placeholder for an unreadable one."""


@dataclass(frozen=True)
class RawChunk:
    """Rows as they were read, with their keys."""

    rows: Sequence[RawRow]
    keys: Sequence[str]


@dataclass(frozen=True)
class BadExample:
    """An example that cannot be used, or a row that could not be read."""

    index: int
    """Index of the row in the chunk."""
    number: int
    """Number of the example among those of its row, from 1; 0 if the row could not be read."""
    reasons: tuple[str, ...]
    raw: Any
    """The row that the example was to be made from, or the content that could not be read."""


@dataclass(frozen=True)
class EncodedChunk:
    """The examples of a chunk in flat arrays. One row may give several examples, or none."""

    ids: np.ndarray
    """Token ids of all examples, concatenated, int32."""
    lengths: np.ndarray
    """Number of tokens of each example, int64."""
    spans: np.ndarray
    """First loss token and one past the last, relative to the example, int32, [spans, 2]."""
    span_counts: np.ndarray
    """Number of loss spans of each example, int64."""
    indices: np.ndarray
    """Index in the chunk of each example's row, int64."""
    numbers: np.ndarray
    """Number of each example among those of its row, from 1, int32."""
    used: UsedRows
    """Counts of the examples."""
    bad: tuple[BadExample, ...] = ()
    """What is left out; other examples of the same rows are used."""
    num_unreadable: int = 0
    """Rows that could not be read: malformed lines, or JSON that is not an object."""
    targets: np.ndarray | None = None
    """For a model with a head, the targets of all loss tokens, float32, [loss tokens, targets]; None without examples
    or without a head."""
    values: np.ndarray | None = None
    """Numbers of the examples that an objective uses, float32, [examples, values]; None if they have none."""
    branched: bool = False
    """Whether the loss spans of an example are branches; False without examples."""


@dataclass(frozen=True)
class ExpandedRow:
    """A row of a chunk, or one of those that a dialogue was expanded into, from which an example is made."""

    index: int
    """Index in the chunk."""
    number: int
    """Number among those of its row, from 1."""
    key: str
    row: Mapping[str, Any]

    def bad(self, reasons: tuple[str, ...]) -> BadExample:
        """Return that no example can be made from it."""
        return BadExample(self.index, self.number, reasons, shown(self.row))


class ChunkTokenizer:
    """Validate and tokenize rows; can be pickled for worker processes."""

    def __init__(self, row_tokenizer: RowTokenizer, *, max_row_tokens: int | None = None) -> None:
        """Store the settings; an example above `max_row_tokens` tokens is left out."""
        self.row_tokenizer = row_tokenizer
        self.max_row_tokens = max_row_tokens

    def __getstate__(self) -> dict[str, Any]:
        return {"row_tokenizer": self.row_tokenizer, "max_row_tokens": self.max_row_tokens}

    @cached_property
    def schema(self) -> "RowSchema":
        """The marshmallow schema of a row."""
        from partita_schema.rows import row_schema

        return row_schema(self.row_tokenizer.formatter.config, supervised=True)

    @cached_property
    def unknown(self) -> int | None:
        """The tokenizer's unknown token; None if there is none.

        Byte-level tokenizers encode all text: some name their end token as the unknown one.
        """
        tokenizer = self.row_tokenizer.formatter.tokenizer
        token: int | None = getattr(tokenizer, "unk_token_id", None)
        return None if token == getattr(tokenizer, "eos_token_id", None) else token

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """Tokenize a chunk; every example that a row should give is returned, or is among the bad ones."""
        from partita_schema.rows import check_rows

        raw, unreadable = parsed(chunk.rows)
        bad = [BadExample(index, 0, reasons, shown(chunk.rows[index])) for index, reasons in unreadable.items()]
        keys, expander = list(chunk.keys), self.row_tokenizer.expander
        expanded_rows = [
            ExpandedRow(index, number, *made)
            for index in raw
            for number, made in enumerate(made_rows(raw[index], keys[index], expander=expander), start=1)
        ]
        checked = check_rows(self.schema, [expanded.row for expanded in expanded_rows])
        bad += [expanded_rows[place].bad(reasons) for place, reasons in checked.bad.items()]
        good = [expanded_rows[place] for place in checked.clean]
        encoded = self.row_tokenizer.encode_rows(list(checked.clean.values()), [expanded.key for expanded in good])
        examples: list[tuple[int, int, Example]] = []
        for expanded, example in zip(good, encoded, strict=True):
            if isinstance(example, RowError):
                bad.append(expanded.bad((str(example),)))
            elif self.max_row_tokens is not None and len(example.input_ids) > self.max_row_tokens:
                reason = f"more than the {self.max_row_tokens:,} tokens of data.batching.max_tokens"
                bad.append(expanded.bad((reason,)))
            else:
                examples.append((expanded.index, expanded.number, example))
        return replace(
            flat(examples, unknown=self.unknown),
            bad=tuple(sorted(bad, key=lambda one: (one.index, one.number))),
            num_unreadable=len(unreadable),
        )


def made_rows(
    row: Mapping[str, Any], key: str, *, expander: "Expander | None"
) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """Return the row with its key, or the rows of a dialogue that has not been expanded yet."""
    return [(key, row)] if expander is None else expander.expand(row, key)


def parsed(rows: Sequence[RawRow]) -> tuple[dict[int, Mapping[str, Any]], dict[int, tuple[str, ...]]]:
    """Return the rows that are mappings, and the reasons why others are not, both by index."""
    good: dict[int, Mapping[str, Any]] = {}
    bad: dict[int, tuple[str, ...]] = {}
    for index, row in enumerate(rows):
        if isinstance(row, Unreadable):
            bad[index] = (row.reason,)
            continue
        if not isinstance(row, bytes):
            good[index] = row
            continue
        value, reason = json_row(row)
        if reason:
            bad[index] = (reason,)
        else:
            good[index] = value
    return good, bad


def shown(row: Any) -> Any:
    """Return a bad row in the form that the quarantine stores."""
    if isinstance(row, Unreadable):
        return row.raw
    return row.decode("utf-8", "replace") if isinstance(row, bytes) else row


def flat(examples: Sequence[tuple[int, int, Example]], *, unknown: int | None) -> EncodedChunk:
    """Return examples with the indices of their rows and their numbers as arrays.

    `unknown` is the tokenizer's unknown token, which is counted where it would be learned: not before a head.
    """
    rows = [example for *_, example in examples]
    has_targets = any(example.targets for example in rows)
    used = UsedRows(
        rows=len(examples),
        cut=sum(example.cut_tokens > 0 for example in rows),
        cut_tokens=sum(example.cut_tokens for example in rows),
        loss_tokens=sum(end - start for example in rows for start, end in example.spans),
        unknown_tokens=0
        if unknown is None or has_targets
        else sum(example.input_ids[start:end].count(unknown) for example in rows for start, end in example.spans),
        widened_spans=sum(len(example.widened_spans) for example in rows),
        widened_such_as=next((f"{row.key}: {row.widened_spans[0]}" for row in rows if row.widened_spans), ""),
    )
    return EncodedChunk(
        ids=np.fromiter(chain.from_iterable(example.input_ids for example in rows), dtype=np.int32),
        lengths=np.array([len(example.input_ids) for example in rows], dtype=np.int64),
        spans=np.array([span for example in rows for span in example.spans], dtype=np.int32).reshape(-1, 2),
        span_counts=np.array([len(example.spans) for example in rows], dtype=np.int64),
        indices=np.array([index for index, *_ in examples], dtype=np.int64),
        numbers=np.array([number for _, number, _ in examples], dtype=np.int32),
        used=used,
        targets=np.array([target for example in rows for target in example.targets], dtype=np.float32)
        if has_targets
        else None,
        values=np.array([example.values for example in rows], dtype=np.float32)
        if any(example.values for example in rows)
        else None,
        branched=any(example.branched for example in rows),
    )
