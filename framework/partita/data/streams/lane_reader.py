"""The rows of a lane in the order of an epoch, from any row on.

A lane has shards of each source, in an order that seed, epoch and source decide. A few are open at a time, and their
rows are taken in turn, so that what stands together in a file does not stand together here. A Mixer says which source
the next row comes from.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.data.planning.mixing import Mixer
from partita.data.streams.base import Position, Stream, StreamRow

OPEN = 4
"""Shards of a source that a lane has open."""
OPEN_IN_ALL = 32
"""Shards that all lanes have open together; but each has one of each source."""


class LaneReader:
    """Rows of a lane, each with the number of its source."""

    def __init__(
        self,
        sources: Sequence[Stream],
        *,
        weights: Sequence[float],
        stop: str,
        lane: int,
        lanes: int,
        seed: int,
        epoch: int,
        state: Any = None,
        shuffle: bool = True,
    ) -> None:
        """`state` is where an earlier reader with the same arguments stood.

        Without `shuffle`, shards are read in order, each to its end.
        """
        self._weights, self._stop = list(weights), stop
        width = max(1, min(OPEN, OPEN_IN_ALL // (lanes * len(sources)))) if shuffle else 1
        counts, ended, places = state if state is not None else (None, [0] * len(sources), [None] * len(sources))
        self._ended = list(ended)
        self._lanes = [
            ShardsInTurn(
                source,
                lane=lane,
                lanes=lanes,
                width=width,
                keys=[seed, epoch, number] if shuffle else None,
                state=place,
            )
            for number, (source, place) in enumerate(zip(sources, places, strict=True))
        ]
        self._mixer = self._mix(counts)

    def take(self, count: int) -> list[tuple[int, StreamRow]]:
        """The next rows; fewer than asked for where the epoch of the lane ends.

        Raises DataError where a shard cannot be read.
        """
        found: list[tuple[int, StreamRow]] = []
        if len(self._lanes) == 1:
            lane = self._lanes[0]
            while len(found) < count and (row := lane.next_row()) is not None:
                found.append((0, row))
            return found
        while len(found) < count and self._alive:
            choice = self._mixer.choose()
            source = self._alive[choice]
            row = self._lanes[source].next_row()
            if row is None:
                if self._end(source):
                    break
                continue
            self._mixer.count(choice)
            found.append((source, row))
        return found

    def state(self) -> list[Any]:
        """Where the next row is: lists of whole numbers."""
        return [list(self._mixer.counts), list(self._ended), [lane.state() for lane in self._lanes]]

    def close(self) -> None:
        """Close all files."""
        for lane in self._lanes:
            lane.close()

    def _mix(self, counts: Sequence[int] | None) -> Mixer:
        """Chooses among the sources that can still give rows."""
        gone = 1 if self._stop == "all_once" or all(self._ended) else 2
        self._alive = [source for source, ended in enumerate(self._ended) if ended < gone]
        return Mixer([self._weights[source] for source in self._alive] or [1.0], counts=counts)

    def _end(self, source: int) -> bool:
        """A source has no more rows in this pass; returns whether that ends the epoch."""
        empty = not self._lanes[source].gave
        if self._stop == "first":
            return True
        self._ended[source] = 2 if empty else 1
        if empty or self._stop == "all_once" or all(self._ended):
            self._mixer = self._mix(None)
        else:
            self._lanes[source].begin_again()
        return not self._alive


class ShardsInTurn:
    """Rows of a lane's shards of one source: a few shards at a time, a row of each in turn."""

    def __init__(
        self, stream: Stream, *, lane: int, lanes: int, width: int, keys: Sequence[int] | None, state: Any = None
    ) -> None:
        """`keys` decide the order; None for the order of the stream."""
        self._stream, self._lane, self._lanes, self._width, self._keys = stream, lane, lanes, width, keys
        self._pass, gave, self._next, self._turn, places = state if state is not None else (0, 0, 0, 0, [])
        self._order = self._shuffled()
        self._open = [OpenShard(stream, int(self._order[place]), place, position) for place, position in places]
        self.gave = bool(gave)
        """Whether there ever was a row."""

    def next_row(self) -> StreamRow | None:
        """The next row; None at the end of the pass."""
        while True:
            while len(self._open) < self._width and self._next < len(self._order):
                self._open.append(OpenShard(self._stream, int(self._order[self._next]), self._next, None))
                self._next += 1
            if not self._open:
                return None
            if self._turn >= len(self._open):
                self._turn = 0
            row: StreamRow | None = self._open[self._turn].next_row()
            if row is not None:
                self._turn += 1
                self.gave = True
                return row
            self._replace(self._turn)

    def begin_again(self) -> None:
        """Another pass, with the shards in another order."""
        self._pass, self._next, self._turn = self._pass + 1, 0, 0
        self._order = self._shuffled()

    def state(self) -> list[Any]:
        """Pass, whether there ever was a row, next shard, turn, and the open shards with their positions."""
        places = [[shard.place, shard.position] for shard in self._open]
        return [self._pass, int(self.gave), self._next, self._turn, places]

    def close(self) -> None:
        for shard in self._open:
            shard.close()

    def _replace(self, turn: int) -> None:
        """Put the next shard in the place of one that has ended."""
        self._open[turn].close()
        if self._next < len(self._order):
            self._open[turn] = OpenShard(self._stream, int(self._order[self._next]), self._next, None)
            self._next += 1
        else:
            del self._open[turn]

    def _shuffled(self) -> np.ndarray:
        shards = np.arange(len(self._stream.shards))
        if self._keys is not None:
            shards = np.random.default_rng([*self._keys, self._pass]).permutation(shards)
        return shards[self._lane :: self._lanes]


class OpenShard:
    """A shard that is being read. It is opened with its first row."""

    def __init__(self, stream: Stream, shard: int, place: int, position: Position | None) -> None:
        self.place = place
        """Place of the shard in the order of the lane."""
        self.position = position
        """Where the next row is."""
        self._rows = stream.read(shard, position)

    def next_row(self) -> StreamRow | None:
        found = next(self._rows, None)
        if found is None:
            return None
        self.position = found[1]
        return found[0]

    def close(self) -> None:
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()
