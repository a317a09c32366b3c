"""A tokenized split: all token ids in one flat int32 array."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partita.data.chunks import ChunkTokenizer, EncodedChunk, RawChunk
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import Ledger
from partita.data.rows import RowKeys, Rows, digest
from partita.data.workers import EncodingWorkers
from partita_schema.errors import NoUsableRowsError
from partita_schema.sections.data import LoaderOptions

IN_THIS_PROCESS = LoaderOptions()
"""Loader options without worker processes."""


@dataclass(frozen=True)
class TokenizedDataset:
    """Tokenized rows by index. N rows, L tokens in total, S spans of loss tokens."""

    ids_L: np.ndarray
    """Token ids of all rows, concatenated, int32."""
    starts_Nplus1: np.ndarray
    """Start of each row in ids_L, followed by L, int64."""
    loss_spans_S2: np.ndarray
    """First loss token and one past the last, relative to the row, int32."""
    span_starts_Nplus1: np.ndarray
    """Start of each row's spans in loss_spans_S2, followed by S, int64."""
    keys: RowKeys
    """Key of each row."""
    indices_N: np.ndarray
    """Index of each row in the Rows that were tokenized, int64."""
    fingerprint_inputs: dict[str, str]
    """Inputs that decided the rows and their ids, by readable names: files, tokenizer, prompt ..."""
    isolated: bool = False
    """Whether each loss span is a document that does not attend to the others of its row; see `cut_chunks`."""
    targets_NK: np.ndarray | None = None
    """For a model with a head, the targets of all loss tokens in order, float32; otherwise None."""
    branched: bool = False
    """Whether each loss span of a row is a branch: it follows the tokens before the first span, and sees no other."""
    row_values_NK: np.ndarray | None = None
    """Numbers of each row that an objective uses, float32; None if rows have none."""
    text_bytes: int | None = None
    """Bytes of all texts in UTF-8, for bits per byte; None unless all tokens of the texts are in the loss."""

    @classmethod
    def build(
        cls,
        rows: Rows,
        row_tokenizer: RowTokenizer,
        *,
        ledger: Ledger,
        split: str = "training",
        options: LoaderOptions = IN_THIS_PROCESS,
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
    ) -> "TokenizedDataset":
        """Validate and tokenize every row once.

        Bad and unreadable rows go to the ledger, which is then checked and saved.

        Args:
            rows: Rows of one split.
            row_tokenizer: Tokenizes the rows.
            ledger: Records used and bad rows.
            split: Name of the split in the ledger.
            options: Worker processes and prefetching.
            chunk: Rows per chunk.
            progress: Called with the number of rows processed since the last call.

        Raises:
            DataError: If there are too many bad rows, or no row is left.
        """
        ledger.leave_out_unreadable(rows.bad, split=split)
        flat = FlatBuilder()
        for start, encoded in encoded_chunks(rows, row_tokenizer, options=options, chunk=chunk):
            note_chunk(rows, start, encoded, ledger, split=split)
            flat.add(encoded, start)
            if progress is not None:
                progress(min(chunk, len(rows) - start))
        save_checked(ledger, split=split, used=bool(flat))
        inputs = {"files": rows.fingerprint} | row_tokenizer.fingerprint_inputs()
        return flat.finish(keys=rows.keys, fingerprint_inputs=inputs)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, [N], int32."""
        return np.diff(self.starts_Nplus1).astype(np.int32)

    @property
    def loss_tokens(self) -> np.ndarray:
        """Number of loss tokens of each row, [N], int64."""
        spans_S2 = self.loss_spans_S2.reshape(-1, 2).astype(np.int64)
        totals_S1 = np.concatenate([[0], np.cumsum(spans_S2[:, 1] - spans_S2[:, 0])])
        loss_tokens_N: np.ndarray = np.diff(totals_S1[self.span_starts_Nplus1])
        return loss_tokens_N

    @property
    def repeated_tokens(self) -> float:
        """Tokens that all rows would have in addition if each branch were a row with its prompt, as a share of them."""
        if not self.branched or not len(self.ids_L):
            return 0.0
        prompts_N = self.loss_spans_S2.reshape(-1, 2)[self.span_starts_Nplus1[:-1], 0].astype(np.int64)
        branches_N = np.diff(self.span_starts_Nplus1)
        return float((prompts_N * (branches_N - 1)).sum() / len(self.ids_L))

    @property
    def fingerprint(self) -> str:
        """Return a hash of keys, ids and loss spans."""
        arrays = (self.ids_L, self.starts_Nplus1, self.loss_spans_S2, self.span_starts_Nplus1)
        more = [array for array in (self.targets_NK, self.row_values_NK) if array is not None]
        return digest(self.keys.digest(), *arrays, *more)

    def ids(self, index: int) -> np.ndarray:
        """Return the token ids of a row."""
        return self.ids_L[self.starts_Nplus1[index] : self.starts_Nplus1[index + 1]]

    def loss_spans(self, index: int) -> np.ndarray:
        """Return the loss spans of a row, [spans, 2]."""
        return self.loss_spans_S2[self.span_starts_Nplus1[index] : self.span_starts_Nplus1[index + 1]]

    def take(self, indices: np.ndarray) -> "TokenizedDataset":
        """Return a copy of the rows at `indices`, in that order; it holds no reference to the other rows."""
        ids, ends = take_rows(self.ids_L, self.starts_Nplus1, indices)
        spans, span_ends = take_rows(self.loss_spans_S2, self.span_starts_Nplus1, indices)
        return TokenizedDataset(
            ids,
            ends,
            spans,
            span_ends,
            self.keys.take(indices),
            self.indices_N[indices],
            self.fingerprint_inputs,
            isolated=self.isolated,
            targets_NK=self.targets(indices),
            branched=self.branched,
            row_values_NK=None if self.row_values_NK is None else self.row_values_NK[indices],
        )

    def targets(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the targets of the loss tokens of the rows at `indices`, in that order; None without a head."""
        if self.targets_NK is None:
            return None
        return take_rows(self.targets_NK, self._target_starts_Nplus1, indices)[0]

    @cached_property
    def _target_starts_Nplus1(self) -> np.ndarray:
        """Start of each row in targets_NK, followed by their number."""
        return starts([self.loss_tokens])


NO_ROWS = TokenizedDataset(
    ids_L=np.empty(0, dtype=np.int32),
    starts_Nplus1=np.zeros(1, dtype=np.int64),
    loss_spans_S2=np.empty((0, 2), dtype=np.int32),
    span_starts_Nplus1=np.zeros(1, dtype=np.int64),
    keys=RowKeys.counted("", 0),
    indices_N=np.empty(0, dtype=np.int64),
    fingerprint_inputs={},
)
"""The dataset that batches without rows are built from."""


def encoded_chunks(
    rows: Rows, row_tokenizer: RowTokenizer, *, options: LoaderOptions, chunk: int
) -> Iterator[tuple[int, EncodedChunk]]:
    """Yield all rows tokenized in chunks, each with the index of its first row.

    Args:
        rows: The rows.
        row_tokenizer: Tokenizes the rows.
        options: Worker processes and prefetching.
        chunk: Rows per chunk.
    """
    begins = range(0, len(rows), chunk)
    raw = (
        RawChunk(rows.get(indices), rows.keys.take(indices))
        for indices in (np.arange(start, min(start + chunk, len(rows))) for start in begins)
    )
    with EncodingWorkers(ChunkTokenizer(row_tokenizer), options) as workers:
        yield from zip(begins, workers.map(raw, ahead=options.prefetch), strict=True)


def save_checked(ledger: Ledger, *, split: str, used: bool) -> None:
    """Check and save the ledger after the last row.

    Args:
        ledger: The ledger.
        split: Name of the split.
        used: Whether any row is used.

    Raises:
        DataError: There are too many bad rows.
        NoUsableRowsError: None is used.
    """
    ledger.check()
    ledger.save()
    if not used:
        raise NoUsableRowsError(why_none_is_used(ledger, split=split))


def why_none_is_used(ledger: Ledger, *, split: str) -> str:
    """Return in words why no row of a split is used."""
    return f"no {split} row can be used, of {ledger.split(split).rows:,}:\n{ledger.main_reasons()}"


def note_chunk(rows: Rows, start: int, encoded: EncodedChunk, ledger: Ledger, *, split: str) -> None:
    """Record the rows of a chunk in the ledger.

    Args:
        rows: All rows.
        start: Index of the chunk's first row.
        encoded: The tokenized chunk.
        ledger: The ledger.
        split: Name of the split in the ledger.
    """
    for row in encoded.bad:
        file, number = rows.keys.location(start + row.index)
        key = rows.key(start + row.index)
        ledger.leave_out(key, row.reasons, split=split, file=file, number=number, row=row.raw)
    ledger.use(encoded.used, split=split)


class FlatBuilder:
    """Collect tokenized chunks in flat arrays."""

    def __init__(self) -> None:
        self._chunks: list[EncodedChunk] = []
        self._indices: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return any(len(indices) for indices in self._indices)

    def add(self, chunk: EncodedChunk, start: int) -> None:
        """Add the examples of a chunk whose first row has index `start`."""
        self._chunks.append(chunk)
        self._indices.append(chunk.indices + start)

    def finish(self, *, keys: RowKeys, fingerprint_inputs: dict[str, str], numbered: bool = False) -> TokenizedDataset:
        """Return the collected examples.

        Args:
            keys: Keys of all rows.
            fingerprint_inputs: Inputs that decided the ids, by name.
            numbered: Whether one row may have given several examples; their keys are then numbered.
        """
        indices = np.concatenate(self._indices)
        keys = keys.take(indices)
        if numbered:
            numbers = np.concatenate([chunk.numbers for chunk in self._chunks])
            keys = RowKeys(keys.names, keys.files, keys.numbers, examples=numbers)
        return TokenizedDataset(
            ids_L=np.concatenate([chunk.ids for chunk in self._chunks]),
            starts_Nplus1=starts([chunk.lengths for chunk in self._chunks]),
            loss_spans_S2=np.concatenate([chunk.spans for chunk in self._chunks]),
            span_starts_Nplus1=starts([chunk.span_counts for chunk in self._chunks]),
            keys=keys,
            indices_N=indices,
            fingerprint_inputs=fingerprint_inputs,
            targets_NK=concatenated([chunk.targets for chunk in self._chunks]),
            branched=any(chunk.branched for chunk in self._chunks),
            row_values_NK=concatenated([chunk.values for chunk in self._chunks]),
        )


def concatenated(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate the targets or values of chunks. Chunks without examples have none; None if none has."""
    present = [chunk for chunk in arrays if chunk is not None]
    return np.concatenate(present) if present else None


def take_rows(flat: np.ndarray, starts_Nplus1: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of the rows at `indices` in a flat array, concatenated, with their new starts."""
    firsts = starts_Nplus1[indices]
    counts = starts_Nplus1[indices + 1] - firsts
    ends = starts([counts])
    return flat[np.repeat(firsts - ends[:-1], counts) + np.arange(ends[-1])], ends


def starts(counts: list[np.ndarray]) -> np.ndarray:
    """Return cumulative sums, starting with 0."""
    return np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
