"""A lane of a stream: windows of rows, encoded and cut into batches, from any position.

Nothing is carried from one window to the next. Where a lane stands is therefore the reader's position at the start of
a window, the window's number and the batches taken of it; going on from there reads one window again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.data.chunks import BadPlace, EncodedChunk, RawChunk, Unreadable, shown
from partita.data.encoded import EncodedRows, FlatBuilder
from partita.data.planning.plan import PlannedBatch
from partita.data.planning.policies import Policy
from partita.data.rows import RowKeys
from partita.data.streams.base import Stream, StreamRow
from partita.data.streams.lane_reader import LaneReader
from partita.data.workers import Workers

CHUNK = 64
"""Rows that a worker encodes at a time."""


@dataclass(frozen=True)
class LanePlan:
    """What decides the batches of all lanes."""

    streams: Sequence[Stream]
    weights: Sequence[float]
    stop: str
    lanes: int
    seed: int
    policy: Policy

    def reader(self, lane: int, *, epoch: int, state: Any = None) -> LaneReader:
        """The rows of a lane in an epoch."""
        return LaneReader(
            self.streams,
            weights=self.weights,
            stop=self.stop,
            lane=lane,
            lanes=self.lanes,
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
        """What decides the rows, by names that a person knows."""
        parts = {f"stream {stream.name}": stream.fingerprint for stream in self.streams}
        if len(self.streams) > 1:
            parts["mix"] = f"{list(self.weights)}, stop {self.stop}"
        return parts

    def keys(self, rows: Sequence[tuple[int, StreamRow]]) -> RowKeys:
        """Keys of rows, given with the number of their stream: `label:number`."""
        labels = [label for stream in self.streams for label in stream.shards]
        first = [0, *np.cumsum([len(stream.shards) for stream in self.streams]).tolist()]
        files = np.array([first[stream] + row.shard for stream, row in rows], dtype=np.int32)
        return RowKeys(labels, files, np.array([row.number for _, row in rows], dtype=np.int64))


@dataclass(frozen=True)
class SeenWindow:
    """What became of the rows of a window."""

    rows: Sequence[tuple[int, StreamRow]]
    """Number of the stream, and the row."""
    keys: RowKeys
    bad: Sequence[BadPlace]
    used: int
    """Rows of which everything is used."""
    cut: int
    cut_tokens: int


@dataclass(frozen=True)
class ReadWindow:
    """A window that is being encoded."""

    number: int
    before: Any
    """Where the reader stood at its start."""
    after: Any
    rows: list[tuple[int, StreamRow]]
    keys: RowKeys
    chunks: list[Callable[[], EncodedChunk]]


class Lane:
    """Batches of a lane in an epoch."""

    def __init__(
        self,
        plan: LanePlan,
        number: int,
        *,
        epoch: int,
        workers: Workers[RawChunk, EncodedChunk],
        ahead: int,
        seen: Callable[[SeenWindow], None],
        numbered: bool = False,
        place: Sequence[Any] | None = None,
    ) -> None:
        """`place` is where an earlier lane stood; `seen` is told of each window when its first batch is taken.

        `numbered` says that a row may give several examples, whose keys end in their number.
        """
        self._plan, self._number, self._epoch = plan, number, epoch
        self._workers, self._ahead, self._seen = workers, ahead, seen
        state, window, taken = place if place is not None else (None, 0, 0)
        self._numbered = numbered
        self._reader = plan.reader(number, epoch=epoch, state=state)
        self._next_window = window
        self._read: deque[ReadWindow] = deque()
        self._encoded: EncodedRows | None = None
        self._batches: list[PlannedBatch] = []
        self._taken = 0
        self._open: ReadWindow | None = None
        self._ended = False
        if taken:
            self._begin_window(known=True)
            self._taken = taken

    @property
    def place(self) -> list[Any]:
        """Where the lane stands."""
        if self._open is not None and self._taken < len(self._batches):
            return [self._open.before, self._open.number, self._taken]
        if self._open is not None:
            return [self._open.after, self._open.number + 1, 0]
        if self._read:
            return [self._read[0].before, self._read[0].number, 0]
        return [self._reader.state(), self._next_window, 0]

    def next_batch(self) -> tuple[EncodedRows, PlannedBatch] | None:
        """The next batch and the rows that it points at; None at the end of the epoch."""
        while self._taken >= len(self._batches):
            if not self._begin_window(known=False):
                return None
        batch = self._batches[self._taken]
        self._taken += 1
        assert self._encoded is not None
        return self._encoded, batch

    def _begin_window(self, *, known: bool) -> bool:
        """Open the next window that has rows; False where there is none. Known ones are not told of again."""
        self._read_ahead()
        if not self._read:
            return False
        window = self._read.popleft()
        flat, bad, cut, cut_tokens = FlatBuilder(), list[BadPlace](), 0, 0
        for place, chunk in enumerate(chunk() for chunk in window.chunks):
            flat.add(chunk, place * CHUNK)
            bad += [BadPlace(row.place + place * CHUNK, row.reasons, row.raw) for row in chunk.bad]
            cut, cut_tokens = cut + chunk.cut, cut_tokens + chunk.cut_tokens
        self._open, self._taken, self._batches = window, 0, []
        used = np.empty(0, dtype=np.int64)
        if flat:
            self._encoded = flat.finish(keys=window.keys, parts={}, numbered=self._numbered)
            fitting = self._fitting(self._encoded, window, bad)
            self._batches = self._cut(self._encoded, fitting, window.number)
            used = self._encoded.places_N[fitting]
        if not known:
            count = len(np.setdiff1d(used, [row.place for row in bad]))
            self._seen(SeenWindow(window.rows, window.keys, bad, count, cut, cut_tokens))
        return True

    def _fitting(self, encoded: EncodedRows, window: ReadWindow, bad: list[BadPlace]) -> np.ndarray:
        """Examples that are no longer than a batch may be; the rows of the others are bad."""
        most = self._plan.policy.most_tokens
        if most is None:
            return np.arange(len(encoded))
        known = {row.place for row in bad}
        reason = f"more than the {most:,} tokens of data.batching.max_tokens"
        for place in np.unique(encoded.places_N[encoded.lengths > most]).tolist():
            if place not in known:
                bad.append(BadPlace(place, (reason,), shown(window.rows[place][1].row)))
        return np.flatnonzero(encoded.lengths <= most)

    def _cut(self, encoded: EncodedRows, order: np.ndarray, window: int) -> list[PlannedBatch]:
        """Batches of some examples of a window."""
        chance = np.random.default_rng([self._plan.seed, self._epoch, window, self._number])
        if self._plan.policy.shuffle_rows:
            order = chance.permutation(order)
        cuts = self._plan.policy.cut(encoded.lengths[order], chance)
        return [PlannedBatch(order[batch.rows], batch.lines) for batch in cuts]

    def _read_ahead(self) -> None:
        while len(self._read) <= self._ahead and not self._ended:
            before = self._reader.state()
            rows = self._reader.take(self._plan.policy.window)
            if not rows:
                self._ended = True
                return
            keys = self._plan.keys(rows)
            self._read.append(
                ReadWindow(self._next_window, before, self._reader.state(), rows, keys, self._submit(rows, keys))
            )
            self._next_window += 1

    def _submit(self, rows: Sequence[tuple[int, StreamRow]], keys: RowKeys) -> list[Callable[[], EncodedChunk]]:
        raw = [Unreadable(row.reason, row.raw) if row.reason else row.row for _, row in rows]
        starts = range(0, len(raw), CHUNK)
        return [
            self._workers.submit(RawChunk(raw[start : start + CHUNK], keys[start : start + CHUNK])) for start in starts
        ]
