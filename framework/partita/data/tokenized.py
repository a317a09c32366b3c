"""A split encoded once: all ids in one flat array, four bytes a token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from partita.data.chunks import ChunkEncoder, EncodedChunk, RawChunk
from partita.data.ledger import Ledger
from partita.data.rows import RowKeys, Rows, digest
from partita.data.shaping.row_tokenizer import RowTokenizer
from partita.data.workers import EncodingWorkers
from partita_schema.config import Config
from partita_schema.data import LoaderOptions
from partita_schema.errors import DataError

IN_THIS_PROCESS = LoaderOptions()
"""No worker processes."""


@dataclass(frozen=True)
class TokenizedDataset:
    """Encoded rows by index. N rows, L tokens in all, S spans of learned tokens."""

    ids_L: np.ndarray
    """Token ids of all rows, one row behind the other, int32."""
    starts_N1: np.ndarray
    """Where each row starts in ids_L, and the end, int64."""
    loss_spans_S2: np.ndarray
    """First learned token and the one behind the last, in the row, int32."""
    span_starts_N1: np.ndarray
    """Where each row's spans start in loss_spans_S2, and the end, int64."""
    keys: RowKeys
    """Key of each row."""
    indices_N: np.ndarray
    """Place of each row in the Rows that were encoded, int64."""
    parts: dict[str, str]
    """What decided the rows and their ids, by names that a person knows: files, tokenizer, prompt ..."""

    @classmethod
    def build(
        cls,
        rows: Rows,
        encoder: RowTokenizer,
        *,
        ledger: Ledger,
        split: str = "training",
        options: LoaderOptions = IN_THIS_PROCESS,
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
    ) -> "TokenizedDataset":
        """Check and encode every row once; `progress` is told the number of rows done since the last call.

        Bad rows, and those that could not be read, go to the ledger, which is checked and saved. Raises DataError
        where there are too many, or nothing is left.
        """
        ledger.leave_out_unreadable(rows.bad, split=split)
        flat = FlatBuilder()
        for start, found in encoded_chunks(rows, encoder, options=options, chunk=chunk):
            note_chunk(rows, start, found, ledger, split=split)
            flat.add(found, start)
            if progress is not None:
                progress(min(chunk, len(rows) - start))
        ledger.check()
        ledger.save()
        if not flat:
            met = len(rows) + len(rows.bad)
            raise DataError(f"no {split} row can be used, of {met:,}:\n{ledger.main_reasons()}")
        parts = {"files": rows.fingerprint} | encoder.parts()
        return flat.finish(keys=rows.keys, parts=parts)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, [N], int32."""
        return np.diff(self.starts_N1).astype(np.int32)

    @property
    def loss_tokens(self) -> np.ndarray:
        """Learned tokens of each row, [N], int64."""
        spans_S2 = self.loss_spans_S2.reshape(-1, 2).astype(np.int64)
        totals_S1 = np.concatenate([[0], np.cumsum(spans_S2[:, 1] - spans_S2[:, 0])])
        learned_N: np.ndarray = np.diff(totals_S1[self.span_starts_N1])
        return learned_N

    @property
    def fingerprint(self) -> str:
        """A hash of keys, ids and learned tokens."""
        arrays = (self.ids_L, self.starts_N1, self.loss_spans_S2, self.span_starts_N1)
        return digest(self.keys.digest(), *arrays)

    def ids(self, index: int) -> np.ndarray:
        """Token ids of a row."""
        return self.ids_L[self.starts_N1[index] : self.starts_N1[index + 1]]

    def loss_spans(self, index: int) -> np.ndarray:
        """Learned spans of a row, [spans, 2]."""
        return self.loss_spans_S2[self.span_starts_N1[index] : self.span_starts_N1[index + 1]]

    def take(self, indices: np.ndarray) -> "TokenizedDataset":
        """A copy of some rows, in the order asked for, that keeps nothing of the others."""
        ids, ends = taken(self.ids_L, self.starts_N1, indices)
        spans, span_ends = taken(self.loss_spans_S2, self.span_starts_N1, indices)
        keys, places = self.keys.take(indices), self.indices_N[indices]
        return TokenizedDataset(ids, ends, spans, span_ends, keys, places, self.parts)


NO_ROWS = TokenizedDataset(
    ids_L=np.empty(0, dtype=np.int32),
    starts_N1=np.zeros(1, dtype=np.int64),
    loss_spans_S2=np.empty((0, 2), dtype=np.int32),
    span_starts_N1=np.zeros(1, dtype=np.int64),
    keys=RowKeys.counted("", 0),
    indices_N=np.empty(0, dtype=np.int64),
    parts={},
)
"""What batches without rows are made of."""


def encoded_chunks(
    rows: Rows, encoder: RowTokenizer, *, options: LoaderOptions, chunk: int
) -> Iterator[tuple[int, EncodedChunk]]:
    """All rows encoded a chunk at a time, each with the place of its first row, by as many processes as asked for."""
    begins = range(0, len(rows), chunk)
    raw = (
        RawChunk(rows.get(indices), rows.keys.take(indices))
        for indices in (np.arange(start, min(start + chunk, len(rows))) for start in begins)
    )
    with EncodingWorkers(ChunkEncoder(encoder), options) as workers:
        yield from zip(begins, workers.map(raw, ahead=options.prefetch), strict=True)


def note_chunk(rows: Rows, start: int, found: EncodedChunk, ledger: Ledger, *, split: str) -> None:
    """Tell the ledger what became of the rows of a chunk that starts with row `start`."""
    for row in found.bad:
        file, number = rows.keys.place(start + row.place)
        key = rows.key(start + row.place)
        ledger.leave_out(key, row.reasons, split=split, file=file, number=number, row=row.raw)
    ledger.use(found.used, split=split)


class FlatBuilder:
    """Collects encoded chunks in flat arrays."""

    def __init__(self) -> None:
        self._chunks: list[EncodedChunk] = []
        self._places: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return any(len(places) for places in self._places)

    def add(self, chunk: EncodedChunk, start: int) -> None:
        """Keep the examples of a chunk whose first row has the place `start`."""
        self._chunks.append(chunk)
        self._places.append(chunk.places + start)

    def finish(self, *, keys: RowKeys, parts: dict[str, str], numbered: bool = False) -> TokenizedDataset:
        """All of it; `keys` are those of all rows, `numbered` where a row may have given several examples."""
        places = np.concatenate(self._places)
        keys = keys.take(places)
        if numbered:
            numbers = np.concatenate([chunk.numbers for chunk in self._chunks])
            keys = RowKeys(keys.names, keys.files, keys.numbers, parts=numbers)
        return TokenizedDataset(
            ids_L=np.concatenate([chunk.ids for chunk in self._chunks]),
            starts_N1=starts([chunk.lengths for chunk in self._chunks]),
            loss_spans_S2=np.concatenate([chunk.spans for chunk in self._chunks]),
            span_starts_N1=starts([chunk.span_counts for chunk in self._chunks]),
            keys=keys,
            indices_N=places,
            parts=parts,
        )


def taken(flat: np.ndarray, starts_N1: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What some rows have in a flat array, one behind the other, and where each starts in it, and the end."""
    firsts = starts_N1[indices]
    counts = starts_N1[indices + 1] - firsts
    ends = starts([counts])
    return flat[np.repeat(firsts - ends[:-1], counts) + np.arange(ends[-1])], ends


def starts(counts: list[np.ndarray]) -> np.ndarray:
    """Running totals, beginning with 0."""
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)


def texts(rows: Rows, config: Config, *, supervised: bool) -> Iterator[str]:
    """Prompt and answer of every good row as plain text, to train a tokenizer on: no chat template, no retrieval.

    Dialogues are expanded into the rows that are trained on: each may show and learn what no other does. Prompts alone
    where `supervised` is false. Raises DataError where no row is good.
    """
    from partita.data.dialogue.expand import expanded
    from partita.data.shaping.formatter import Formatter
    from partita_schema.rows import check_rows, row_schema

    formatter = Formatter(config, tokenizer=None)
    schema = row_schema(config, supervised=supervised)
    made = expanded(rows, formatter.expander if supervised else None)
    good, reason = 0, ""
    for chunk in made.iterate():
        checked = check_rows(schema, chunk)
        good += len(checked.clean)
        if checked.bad and not reason:
            reason = f"; such as {made.key(min(checked.bad))}: {checked.bad[min(checked.bad)][0]}"
        for row in checked.clean.values():
            shaped = formatter.format(row) if supervised else formatter.format_prompt(row)
            yield from (segment.text for segment in shaped.segments)
    if not good:
        raise DataError(f"no row for the tokenizer of the new model can be used, of {len(made):,}{reason}")
