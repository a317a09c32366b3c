"""A shard group of a stream: windows of rows, tokenized and cut into batches, resumable at any batch.

Nothing is carried from one window to the next. The position of a group is therefore the reader's position at the start
of a window, the window's number and the number of batches taken from it; resuming reads at most one window again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from partita.data.batching.documents import cut_chunks
from partita.data.batching.plan import PlannedBatch
from partita.data.batching.policies import Policy
from partita.data.chunks import BadChunkRow, EncodedChunk, RawChunk, Unreadable
from partita.data.formats.base import StreamRow
from partita.data.ledger import UsedRows
from partita.data.rows import RowKeys
from partita.data.streams.base import Stream
from partita.data.streams.interleaved_reader import InterleavedReader
from partita.data.tokenized import FlatBuilder, TokenizedDataset
from partita.data.workers import EncodingWorkers
from partita_schema.sections.batching import ChunkBatching

CHUNK = 64
"""Rows that a worker tokenizes at a time."""
MAX_DOUBLINGS = 32
"""Number of doublings after which a window that started with one row is larger than any limit."""


@dataclass(frozen=True)
class ShardPlan:
    """What decides the batches of all shard groups."""

    streams: Sequence[Stream]
    weights: Sequence[float]
    stop: str
    num_groups: int
    seed: int
    policy: Policy
    chunks: ChunkBatching | None = None
    """How documents are joined and cut, for language modelling."""

    def reader(self, group: int, *, epoch: int, state: Any = None) -> InterleavedReader:
        """Return the reader of a shard group's rows in an epoch."""
        return InterleavedReader(
            self.streams,
            weights=self.weights,
            stop=self.stop,
            group=group,
            num_groups=self.num_groups,
            seed=self.seed,
            epoch=epoch,
            state=state,
            shuffle=self.policy.shuffle_rows,
        )

    @property
    def names(self) -> str:
        """Names of the streams, for messages."""
        return ", ".join(stream.name for stream in self.streams)

    @property
    def parts(self) -> dict[str, str]:
        """What decides the rows, by readable names."""
        parts = {f"stream {stream.name}": stream.fingerprint for stream in self.streams}
        if len(self.streams) > 1:
            parts["mix"] = f"{list(self.weights)}, stop {self.stop}"
        return parts

    def keys(self, rows: Sequence[tuple[int, StreamRow]]) -> RowKeys:
        """Return the keys `label:number` of rows, each passed with the index of its stream."""
        files = np.array([self._first_labels[stream] + row.shard for stream, row in rows], dtype=np.int32)
        return RowKeys(self._labels, files, np.array([row.number for _, row in rows], dtype=np.int64))

    def cut_chunks(self, documents: TokenizedDataset, chunks: ChunkBatching) -> TokenizedDataset:
        """Cut the documents of a window into chunks, none of which holds documents of two streams."""
        assert chunks.context_length is not None, "the length of chunks is set when a run begins"
        sources_N = np.searchsorted(self._first_labels, documents.keys.files, side="right") - 1
        return cut_chunks(documents, chunks.context_length, isolate=chunks.isolate_documents, sources_N=sources_N)

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """Labels of all shards of all streams, built once for all windows."""
        return tuple(label for stream in self.streams for label in stream.shards)

    @cached_property
    def _first_labels(self) -> list[int]:
        """Index of each stream's first label."""
        return [0, *np.cumsum([len(stream.shards) for stream in self.streams]).tolist()]


@dataclass(frozen=True)
class SeenWindow:
    """Outcome of the rows of a window."""

    keys: RowKeys
    bad: Sequence[BadChunkRow]
    used: UsedRows
    """Counts of the rows that are used entirely."""
    num_unreadable: int
    """Bad rows that are not rows at all."""


@dataclass(frozen=True)
class WindowPosition:
    """Position of a window in the stream."""

    number: int
    before: Any
    """Position of the reader at its start."""
    after: Any


@dataclass(frozen=True)
class ReadWindow:
    """A window that is being tokenized. Its raw rows are held only by the workers."""

    position: WindowPosition
    keys: RowKeys
    chunks: deque[Callable[[], EncodedChunk]]


class ShardGroup:
    """Yield the batches of a shard group in an epoch. Batches that were taken are no longer in memory."""

    def __init__(
        self,
        plan: ShardPlan,
        number: int,
        *,
        epoch: int,
        workers: EncodingWorkers[RawChunk, EncodedChunk],
        seen: Callable[[SeenWindow], None],
        numbered: bool = False,
        position: Sequence[Any] | None = None,
    ) -> None:
        """Start a shard group, or resume it at `position`.

        Args:
            plan: The streams and the policy.
            number: Index of the group.
            epoch: The epoch.
            workers: Tokenize the rows, and leave out examples longer than the policy's `max_row_tokens`.
            seen: Called with each window when its first batch is taken.
            numbered: Whether one row may give several examples, whose keys then end in their number.
            position: The `position` of an earlier group; None for the start of the epoch.
        """
        self._plan, self._number, self._epoch = plan, number, epoch
        self._workers, self._seen = workers, seen
        state, window, known = position if position is not None else (None, 0, 0)
        self._next_window: int = window
        self._known: int = known
        """Number of batches of the next window that were taken before resuming."""
        self._numbered = numbered
        self._reader = plan.reader(number, epoch=epoch, state=state)
        self._read: deque[ReadWindow] = deque()
        self._batches: deque[tuple[TokenizedDataset, PlannedBatch]] = deque()
        self._cut_into = 0
        self._open: WindowPosition | None = None
        self.ended = False
        """Whether all windows were read."""

    @property
    def position(self) -> list[Any]:
        """Position of the group, as JSON."""
        if self._open is not None and self._batches:
            return [self._open.before, self._open.number, self._cut_into - len(self._batches)]
        if self._open is not None:
            return [self._open.after, self._open.number + 1, 0]
        if self._read:
            return [self._read[0].position.before, self._read[0].position.number, self._known]
        return [self._reader.state(), self._next_window, self._known]

    @property
    def ahead(self) -> int:
        """Number of windows that are read and not opened."""
        return len(self._read)

    @property
    def left(self) -> int:
        """Number of batches of the open window that are not taken."""
        return len(self._batches)

    @property
    def windows_held(self) -> float:
        """Number of windows in memory; the open one counts by its remaining share."""
        return len(self._read) + len(self._batches) / max(1, self._cut_into)

    def next_batch(self) -> tuple[TokenizedDataset, PlannedBatch] | None:
        """Return the next batch and its rows; None at the end of the epoch."""
        while not self._batches:
            if not self._read and not self.read_window():
                return None
            self._open_window(self._read.popleft())
        return self._batches.popleft()

    def read_window(self) -> bool:
        """Read the next window and start tokenizing it; return False if there is none."""
        before = self._reader.state()
        rows = self._reader.take(rows_of_window(self._plan.policy, self._next_window))
        if not rows:
            self.ended = True
            return False
        keys = self._plan.keys(rows)
        position = WindowPosition(self._next_window, before, self._reader.state())
        self._read.append(ReadWindow(position, keys, self._submit(rows, keys)))
        self._next_window += 1
        return True

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _open_window(self, window: ReadWindow) -> None:
        """Cut the next window into batches. A window that was partly taken before resuming is not reported again."""
        encoded, seen = self._encoded(window)
        batches = self._cut(encoded, window.position.number) if encoded is not None else []
        known, self._known = self._known, 0
        self._open, self._cut_into = window.position, len(batches)
        self._batches = deque(
            (encoded.take(batch.rows), PlannedBatch(np.arange(len(batch.rows)), batch.lines))
            for batch in batches[known:]
            if encoded is not None
        )
        if not known:
            self._seen(seen)

    def _encoded(self, window: ReadWindow) -> tuple[TokenizedDataset | None, SeenWindow]:
        """Return the examples of a window, None if it has none, and the outcome of its rows."""
        flat, bad, used, num_unreadable = FlatBuilder(), list[BadChunkRow](), UsedRows(), 0
        for start in range(0, len(window.keys), CHUNK):
            chunk = window.chunks.popleft()()
            flat.add(chunk, start)
            bad += [BadChunkRow(row.index + start, row.reasons, row.raw) for row in chunk.bad]
            used += chunk.used
            num_unreadable += chunk.num_unreadable
        encoded = flat.finish(keys=window.keys, parts={}, numbered=self._numbered) if flat else None
        if encoded is not None and self._plan.chunks is not None:
            encoded = self._plan.cut_chunks(encoded, self._plan.chunks)
        return encoded, SeenWindow(window.keys, bad, used, num_unreadable)

    def _cut(self, encoded: TokenizedDataset, window: int) -> list[PlannedBatch]:
        """Cut the examples of a window into batches."""
        chance = np.random.default_rng([self._plan.seed, self._epoch, window, self._number])
        order = np.arange(len(encoded))
        if self._plan.policy.shuffle_rows:
            order = chance.permutation(order)
        cuts = self._plan.policy.cut(encoded.lengths[order], chance)
        return [PlannedBatch(order[batch.rows], batch.lines) for batch in cuts]

    def _submit(self, rows: Sequence[tuple[int, StreamRow]], keys: RowKeys) -> deque[Callable[[], EncodedChunk]]:
        raw = [Unreadable(row.reason, row.raw) if row.reason else row.row for _, row in rows]
        starts = range(0, len(raw), CHUNK)
        return deque(
            self._workers.submit(RawChunk(raw[start : start + CHUNK], keys[start : start + CHUNK])) for start in starts
        )


def rows_of_window(policy: Policy, number: int) -> int:
    """Return the rows in a window. It depends only on the window's number, so that positions need not store it."""
    return min(policy.window, policy.first_window << min(number, MAX_DOUBLINGS))
