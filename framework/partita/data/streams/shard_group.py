"""A shard group of a stream: windows of rows, tokenized and cut into batches, resumable at any batch.

Nothing is carried from one window to the next. The position of a group is therefore the reader's position at the start
of a window, the window's number and the number of batches taken from it; resuming reads at most one window again.

A window is read and tokenized in chunks. If batches hold consecutive rows, a batch is cut as soon as its chunks are
there, else when all of the window are (docs/decisions/0053-first-batch.md).
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
from partita.data.chunks import EncodedChunk, RawChunk, Unreadable
from partita.data.formats.base import StreamRow
from partita.data.rows import RowKeys
from partita.data.streams.base import Stream
from partita.data.streams.interleaved_reader import InterleavedReader
from partita.data.streams.windows import Examples, ReadWindow, SeenRows, seen_rows
from partita.data.tokenized import TokenizedDataset
from partita.data.workers import EncodingWorkers
from partita_schema.sections.batching import ChunkBatching

CHUNK = 64
"""Maximum number of rows that a worker tokenizes at a time."""
SMALL_CHUNK = 32
"""Number of rows in a chunk of several small batches: sending and tokenizing a few rows at a time would take longer."""
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
    def consecutive_rows(self) -> int | None:
        """Examples that a batch needs if it holds consecutive ones; None if it may hold any of its window."""
        return self.policy.consecutive_rows if self.chunks is None else None

    @property
    def names(self) -> str:
        """Names of the streams, for messages."""
        return ", ".join(stream.name for stream in self.streams)

    @property
    def fingerprint_inputs(self) -> dict[str, str]:
        """What decides the rows, by readable names."""
        if len(self.streams) == 1:  # its name may be a path, which can be written in several ways
            return {"stream": self.streams[0].fingerprint}
        inputs = {f"stream {stream.name}": stream.fingerprint for stream in self.streams}
        return inputs | {"mix": f"{list(self.weights)}, stop {self.stop}"}

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


class ShardGroup:
    """Yield the batches of a shard group in an epoch. Batches that were taken are no longer in memory."""

    def __init__(
        self,
        plan: ShardPlan,
        number: int,
        *,
        epoch: int,
        workers: EncodingWorkers[RawChunk, EncodedChunk],
        seen: Callable[[SeenRows], None],
        numbered: bool = False,
        position: Sequence[Any] | None = None,
    ) -> None:
        """Start a shard group, or resume it at `position`.

        Args:
            plan: The streams and the policy.
            number: Index of the group.
            epoch: The epoch.
            workers: Tokenize the rows, and leave out examples longer than the policy's `max_row_tokens`.
            seen: Called with the rows of each window when its first batch is taken; if batches hold consecutive rows,
                with those of one or more chunks when the first batch that needs them is taken.
            numbered: Whether one row may give several examples, whose keys then end in their number.
            position: The `position` of an earlier group; None for the start of the epoch.
        """
        self._plan, self._number, self._epoch = plan, number, epoch
        self._workers, self._seen = workers, seen
        state, window, known = position if position is not None else (None, 0, 0)
        self._next_window: int = window
        self._known: int = known
        """Number of batches of the next window that were taken before resuming."""
        self._reader = plan.reader(number, epoch=epoch, state=state)
        self._read: deque[ReadWindow] = deque()
        self._open: ReadWindow | None = None
        self._examples = Examples(numbered=numbered)
        """Examples of the open window that are in no batch yet."""
        self._batches: deque[tuple[TokenizedDataset, PlannedBatch]] = deque()
        self._cut_into = 0
        """Number of batches that the open window was cut into so far."""
        self.ended = False
        """Whether all windows were read."""

    @property
    def position(self) -> list[Any]:
        """Position of the group, as JSON."""
        if self._open is not None and (self._batches or self._open.has_unencoded_rows):
            return [self._open.before, self._open.number, self._cut_into - len(self._batches)]
        if self._open is not None:
            return [self._open.after, self._open.number + 1, 0]
        if self._read:
            return [self._read[0].before, self._read[0].number, self._known]
        return [self._reader.state(), self._next_window, self._known]

    @property
    def ahead(self) -> int:
        """Number of windows that are read and not opened."""
        return len(self._read)

    @property
    def left(self) -> int:
        """Number of batches of the open window that are not taken; a chunk without batches yet counts as one."""
        return len(self._batches) + (len(self._open.chunks) if self._open is not None else 0)

    @property
    def windows_held(self) -> float:
        """Number of windows in memory; the open one counts by its remaining share."""
        share = len(self._batches) / max(1, self._cut_into)
        return len(self._read) + max(share, self._open.unencoded_fraction if self._open is not None else 0.0)

    def next_batch(self) -> tuple[TokenizedDataset, PlannedBatch] | None:
        """Return the next batch and its rows; None at the end of the epoch."""
        while not self._batches:
            if self._open is not None and self._open.has_unencoded_rows:
                self._cut_more(self._open)
            elif not self._open_window():
                return None
        return self._batches.popleft()

    def read_window(self) -> bool:
        """Read the next window and start tokenizing it; return False if there is none."""
        window = self._begin_window()
        while window is not None and window.unread:
            self._read_chunk(window)
        return window is not None

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _begin_window(self) -> ReadWindow | None:
        """Read the first chunk of the next window; return None if there is none."""
        rows = rows_of_window(self._plan.policy, self._next_window)
        window = ReadWindow(self._next_window, before=self._reader.state(), unread=rows)
        self._read_chunk(window)
        if not window.chunks:
            self.ended = True
            return None
        self._read.append(window)
        self._next_window += 1
        return window

    def _read_chunk(self, window: ReadWindow) -> None:
        """Read the next chunk of a window and start tokenizing it."""
        wanted = min(window.unread, rows_of_chunk(self._plan.policy, window.number, window.num_chunks))
        rows = self._reader.take(wanted)
        window.unread = window.unread - wanted if len(rows) == wanted else 0
        if rows:
            keys = self._plan.keys(rows)
            raw = [Unreadable(row.reason, row.raw) if row.reason else row.row for _, row in rows]
            repeated = frozenset(index for index, (_, row) in enumerate(rows) if row.is_repeated)
            window.add(keys, self._workers.submit(RawChunk(raw, keys, repeated)))
        if not window.unread:
            window.after = self._reader.state()

    def _open_window(self) -> bool:
        """Open the next window; return False if there is none."""
        if not self._read:
            # Workers tokenize a window while it is read. Without them, each chunk is read when it is needed.
            is_read = self.read_window() if self._workers.number else self._begin_window() is not None
            if not is_read:
                return False
        self._open, self._cut_into = self._read.popleft(), 0
        return True

    def _cut_more(self, window: ReadWindow) -> None:
        """Cut the next batches of the open window: once one is complete if rows are consecutive, else all at its end.

        Rows whose batches were taken before resuming are not reported again.
        """
        wanted, seen = self._plan.consecutive_rows, list[tuple[RowKeys, EncodedChunk]]()
        while window.has_unencoded_rows and (wanted is None or len(self._examples) < wanted):
            if not window.chunks:
                self._read_chunk(window)
                continue
            keys, encoded = window.next_chunk()
            seen.append((keys, encoded))
            self._examples.add(keys, encoded)
        batches = self._cut(window) if len(self._examples) else []
        self._cut_into += len(batches)
        taken = min(self._known, len(batches))
        if seen and not self._known:
            self._seen(seen_rows(seen))
        self._known = self._known - taken if window.has_unencoded_rows else 0
        self._batches.extend(batches[taken:])

    def _cut(self, window: ReadWindow) -> list[tuple[TokenizedDataset, PlannedBatch]]:
        """Cut examples into batches: all of the window, or as many as batches of consecutive rows hold."""
        wanted = self._plan.consecutive_rows
        encoded, indices = self._examples.take(
            multiple_of=wanted if wanted is not None and window.has_unencoded_rows else 1
        )
        if self._plan.chunks is not None:
            encoded = self._plan.cut_chunks(encoded, self._plan.chunks)
            indices = np.arange(len(encoded))
        rng = np.random.default_rng([self._plan.seed, self._epoch, window.number, self._number])
        if self._plan.policy.shuffle_rows:
            indices = rng.permutation(indices)
        cuts = self._plan.policy.cut(encoded.lengths[indices], rng)
        return [
            (encoded.take(indices[batch.rows]), PlannedBatch(np.arange(len(batch.rows)), batch.sequences))
            for batch in cuts
        ]


def rows_of_window(policy: Policy, number: int) -> int:
    """Return the rows in a window. It depends only on the window's number, so that positions need not store it."""
    return min(policy.window, policy.first_window << min(number, MAX_DOUBLINGS))


def rows_of_chunk(policy: Policy, window: int, chunk: int) -> int:
    """Return the rows in a chunk of a window, at most CHUNK.

    If batches hold consecutive rows, a chunk holds one batch, an equal part of a large one, or SMALL_CHUNK rows of
    small ones. The first chunk of an epoch holds one batch, and each following one in its window twice as many rows.
    The number does not depend on the number of workers, because saved positions depend on the chunks.
    """
    rows = policy.consecutive_rows
    if rows is None:
        return CHUNK
    part = -(-rows // -(-rows // CHUNK))
    larger = part << min(chunk, MAX_DOUBLINGS) if window == 0 else SMALL_CHUNK
    return max(part, min(SMALL_CHUNK, larger))
