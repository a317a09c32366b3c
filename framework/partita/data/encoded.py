"""A split encoded once: all ids in one flat array, four bytes a token."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partita.data.encoder import Encoder, Example
from partita.data.ledger import Ledger
from partita.data.rows import RowError, RowKeys, Rows, digest
from partita_schema.config import Config
from partita_schema.errors import DataError

if TYPE_CHECKING:
    from marshmallow import Schema


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows by index. N rows, L tokens in all, S spans of learned tokens."""

    ids_L: np.ndarray
    """Token ids of all rows, one row behind the other, int32."""
    starts_N1: np.ndarray
    """Where each row starts in ids_L, and the end, int64."""
    spans_S2: np.ndarray
    """First learned token and the one behind the last, in the row, int32."""
    span_starts_N1: np.ndarray
    """Where each row's spans start in spans_S2, and the end, int64."""
    keys: RowKeys
    """Key of each row."""
    places_N: np.ndarray
    """Place of each row in the Rows that were encoded, int64."""
    parts: dict[str, str]
    """What decided the rows and their ids, by names that a person knows: files, tokenizer, prompt ..."""

    @classmethod
    def build(
        cls,
        rows: Rows,
        encoder: Encoder,
        *,
        schema: "Schema",
        ledger: Ledger,
        split: str = "training",
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
    ) -> "EncodedRows":
        """Check and encode every row once; `progress` is told the number of rows done since the last call.

        Bad rows, and those that could not be read, go to the ledger, which is checked and saved. Raises DataError
        where there are too many, or nothing is left.
        """
        ledger.leave_out_unreadable(rows.bad, split=split)
        flat = FlatBuilder()
        for start in range(0, len(rows), chunk):
            indices = np.arange(start, min(start + chunk, len(rows)))
            flat.add(indices, good_examples(rows, indices, encoder, schema, ledger, split))
            if progress is not None:
                progress(len(indices))
        ledger.check()
        ledger.save()
        if not flat.places:
            raise DataError(f"none of the {len(rows):,} {split} rows can be used")
        places = np.concatenate(flat.places)
        parts = {"files": rows.fingerprint} | encoder.parts()
        return flat.finish(keys=rows.keys.take(places), places=places, parts=parts)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, [N], int32."""
        return np.diff(self.starts_N1).astype(np.int32)

    @property
    def learned_tokens(self) -> np.ndarray:
        """Learned tokens of each row, [N], int64."""
        spans_S2 = self.spans_S2.reshape(-1, 2).astype(np.int64)
        totals_S1 = np.concatenate([[0], np.cumsum(spans_S2[:, 1] - spans_S2[:, 0])])
        learned_N: np.ndarray = np.diff(totals_S1[self.span_starts_N1])
        return learned_N

    @property
    def fingerprint(self) -> str:
        """A hash of keys, ids and learned tokens."""
        arrays = (self.ids_L, self.starts_N1, self.spans_S2, self.span_starts_N1)
        return digest(self.keys.digest(), *arrays)

    def ids(self, index: int) -> np.ndarray:
        """Token ids of a row."""
        return self.ids_L[self.starts_N1[index] : self.starts_N1[index + 1]]

    def spans(self, index: int) -> np.ndarray:
        """Learned spans of a row, [spans, 2]."""
        return self.spans_S2[self.span_starts_N1[index] : self.span_starts_N1[index + 1]]


def good_examples(
    rows: Rows, indices: np.ndarray, encoder: Encoder, schema: "Schema", ledger: Ledger, split: str
) -> list[Example | None]:
    """Examples of some rows; None for bad ones, which the ledger is told."""
    from partita_schema.rows import check_rows

    raw = rows.get(indices)
    checked = check_rows(schema, raw)
    keys = [rows.key(int(index)) for index in indices]
    reasons = dict(checked.bad)
    good = list(checked.clean)
    found: list[Example | None] = [None] * len(raw)
    encoded = encoder.encode_rows([checked.clean[place] for place in good], [keys[place] for place in good])
    for place, example in zip(good, encoded, strict=True):
        if isinstance(example, RowError):
            reasons[place] = (str(example),)
        else:
            found[place] = example
    for place, told in sorted(reasons.items()):
        file, number = rows.keys.place(int(indices[place]))
        ledger.leave_out(keys[place], told, split=split, file=file, number=number, row=raw[place])
    used = [example for example in found if example is not None]
    cuts = [example.cut_tokens for example in used]
    ledger.use(split=split, rows=len(used), cut=sum(cut > 0 for cut in cuts), cut_tokens=sum(cuts))
    return found


class FlatBuilder:
    """Collects examples in flat arrays, a chunk at a time."""

    def __init__(self) -> None:
        self.places: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._spans: list[np.ndarray] = []
        self._span_counts: list[np.ndarray] = []

    def add(self, indices: np.ndarray, examples: Iterable[Example | None]) -> None:
        """Keep the examples of these rows."""
        kept = [(index, example) for index, example in zip(indices, examples, strict=True) if example is not None]
        if not kept:
            return
        found = [example for _, example in kept]
        self.places.append(np.array([index for index, _ in kept], dtype=np.int64))
        self._ids.append(np.array([token for example in found for token in example.input_ids], dtype=np.int32))
        self._lengths.append(np.array([len(example.input_ids) for example in found], dtype=np.int64))
        self._spans.append(np.array([span for example in found for span in example.spans], dtype=np.int32))
        self._span_counts.append(np.array([len(example.spans) for example in found], dtype=np.int64))

    def finish(self, *, keys: RowKeys, places: np.ndarray, parts: dict[str, str]) -> EncodedRows:
        """All of it."""
        return EncodedRows(
            ids_L=np.concatenate(self._ids),
            starts_N1=starts(self._lengths),
            spans_S2=np.concatenate(self._spans),
            span_starts_N1=starts(self._span_counts),
            keys=keys,
            places_N=places,
            parts=parts,
        )


def starts(counts: list[np.ndarray]) -> np.ndarray:
    """Running totals, beginning with 0."""
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)


def texts(rows: Rows, config: Config, *, schema: "Schema") -> Iterator[str]:
    """Prompt and answer of every good row as plain text, to train a tokenizer on: no chat template, no retrieval.

    Prompts alone where `schema` is not supervised.
    """
    from partita.data.prompt import Shaper
    from partita_schema.rows import check_rows

    shaper = Shaper(config, tokenizer=None)
    outputs = {feature.name for feature in config.output_features}
    for chunk in rows.iterate():
        for row in check_rows(schema, chunk).clean.values():
            shaped = shaper.shape(row) if outputs <= row.keys() else shaper.shape_prompt(row)
            yield from (segment.text for segment in shaped.segments)
