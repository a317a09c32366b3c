"""Windows of a stream: rows that were read and are being tokenized in chunks, and the examples for the next batches."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partita.data.chunks import BadExample, EncodedChunk
from partita.data.ledger import UsedRows
from partita.data.rows import RowKeys
from partita.data.tokenized import FlatBuilder, TokenizedDataset


@dataclass
class ReadWindow:
    """A window whose rows are being read and tokenized. Raw rows are held only until they are tokenized."""

    number: int
    before: Any
    """Position of the reader at its start."""
    unread: int
    """Maximum number of rows that are to be read."""
    after: Any = None
    """Position of the reader at its end, once all rows are read."""
    chunks: deque[tuple[RowKeys, Callable[[], EncodedChunk]]] = field(default_factory=deque)
    """Chunks that are being tokenized, with the keys of their rows."""
    num_chunks: int = 0
    """Number of chunks that were read."""

    @property
    def has_unencoded_rows(self) -> bool:
        """Whether there may be rows in addition to those that are tokenized."""
        return bool(self.chunks or self.unread)

    @property
    def unencoded_fraction(self) -> float:
        """Share of the chunks that are not tokenized yet, of those that were read."""
        return len(self.chunks) / max(1, self.num_chunks)

    def add(self, keys: RowKeys, encode: Callable[[], EncodedChunk]) -> None:
        """Add a chunk that was read; `encode` waits for its tokens."""
        self.chunks.append((keys, encode))
        self.num_chunks += 1

    def next_chunk(self) -> tuple[RowKeys, EncodedChunk]:
        """Return the next chunk, tokenized, with the keys of its rows."""
        keys, encode = self.chunks.popleft()
        return keys, encode()


class Examples:
    """Examples of tokenized chunks that are in no batch yet."""

    def __init__(self, *, numbered: bool) -> None:
        """Start without examples; with `numbered`, one row may give several, whose keys then end in their number."""
        self._numbered = numbered
        self._chunks: list[tuple[RowKeys, EncodedChunk]] = []
        self._held = 0
        """Number of examples in these chunks."""
        self._taken = 0
        """Number of examples at their start that are in batches."""

    def __len__(self) -> int:
        return self._held - self._taken

    def add(self, keys: RowKeys, encoded: EncodedChunk) -> None:
        """Add the examples of a chunk, whose rows have these keys."""
        if len(encoded.lengths):
            self._chunks.append((keys, encoded))
            self._held += len(encoded.lengths)

    def take(self, *, multiple_of: int = 1) -> tuple[TokenizedDataset, np.ndarray]:
        """Take as many examples as possible, a multiple of `multiple_of`.

        Returns:
            A dataset that holds them, and their indices in it.
        """
        flat, start = FlatBuilder(), 0
        for keys, encoded in self._chunks:
            flat.add(encoded, start)
            start += len(keys)
        dataset = flat.finish(
            keys=RowKeys.joined([keys for keys, _ in self._chunks]), fingerprint_inputs={}, numbered=self._numbered
        )
        end = self._held - len(self) % multiple_of
        indices = np.arange(self._taken, end)
        self._taken = end
        while self._chunks and self._taken >= (count := len(self._chunks[0][1].lengths)):
            del self._chunks[0]
            self._held -= count
            self._taken -= count
        return dataset, indices


@dataclass(frozen=True)
class SeenRows:
    """Outcome of consecutive rows of a window."""

    keys: RowKeys
    bad: Sequence[BadExample]
    """Examples that are left out and rows that could not be read, with their indices in `keys`."""
    used: UsedRows
    """Counts of the examples that are used."""
    num_unreadable: int
    """Number of rows that could not be read."""


def seen_rows(chunks: Sequence[tuple[RowKeys, EncodedChunk]]) -> SeenRows:
    """Return the outcome of the rows of chunks, passed with their keys."""
    bad, used, num_unreadable, start = list[BadExample](), UsedRows(), 0, 0
    for keys, chunk in chunks:
        bad += [replace(one, index=one.index + start) for one in chunk.bad]
        used += chunk.used
        num_unreadable += chunk.num_unreadable
        start += len(keys)
    return SeenRows(RowKeys.joined([keys for keys, _ in chunks]), bad, used, num_unreadable)
