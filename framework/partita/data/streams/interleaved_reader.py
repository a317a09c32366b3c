"""Read the rows of a shard group in the order of an epoch, resumable at any row.

A group has shards of each source, in an order that depends on seed, epoch and source. A few shards are open at a time,
and their rows are taken in turn, so that neighboring rows of a file are not neighbors here. A Mixer decides the source
of the next row.

If the group's shards of a source have no row although the source should repeat, for instance because it has fewer rows
than there are groups, the group reads all shards of that source, so that the shares hold in every group.
"""

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.data.formats.base import Position, StreamRow
from partita.data.sources.mixed import Mixer
from partita.data.streams.base import Stream
from partita.data.streams.sharding import assign_shards
from partita_schema.common.json_text import parse_json
from partita_schema.errors import ResumeError

OPEN = 4
"""Number of open shards of a source in a group."""
OPEN_IN_ALL = 32
"""Number of open shards in all groups together; each group has at least one of each source."""
NO_ROWS, OWN_ROWS, NONE_OF_ALL, ROWS_OF_ALL = range(4)
"""State of a source in a group: no rows or some rows of its own shards; no rows or some rows of all shards."""


class InterleavedReader:
    """Rows of a shard group, each with the index of its source."""

    def __init__(
        self,
        sources: Sequence[Stream],
        *,
        weights: Sequence[float],
        stop: str,
        group: int,
        num_groups: int,
        seed: int,
        epoch: int,
        state: Any = None,
        shuffle: bool = True,
    ) -> None:
        """Start reading, or resume at `state`.

        Args:
            sources: The streams.
            weights: Relative share of each stream.
            stop: When the epoch ends: `first`, `all` or `all_once`.
            group: Index of the shard group.
            num_groups: Number of shard groups.
            seed: Decides the order, together with epoch and source.
            epoch: The epoch.
            state: The `state()` of an earlier reader with the same arguments.
            shuffle: Whether to shuffle shards; if not, they are read in order, each to its end.

        Raises:
            ResumeError: If the state is malformed.
        """
        self._weights, self._stop = list(weights), stop
        width = max(1, min(OPEN, OPEN_IN_ALL // (num_groups * len(sources)))) if shuffle else 1
        counts, self._ended, positions = read_state(state, len(sources))
        self._readers = [
            ShardsInTurn(
                source,
                group=group,
                num_groups=num_groups,
                width=width,
                keys=[seed, epoch, number] if shuffle else None,
                state=position,
            )
            for number, (source, position) in enumerate(zip(sources, positions, strict=True))
        ]
        self._mixer = self._mix(None)
        if counts is not None:
            if len(counts) != len(self._mixer.counts):
                raise damaged()
            self._mixer.counts = counts

    def take(self, count: int) -> list[tuple[int, StreamRow]]:
        """Return the next `count` rows, or fewer at the end of the group's epoch.

        Raises:
            DataError: If a shard cannot be read.
        """
        rows: list[tuple[int, StreamRow]] = []
        if len(self._readers) == 1:
            reader = self._readers[0]
            while len(rows) < count and (row := reader.next_row()) is not None:
                rows.append((0, row))
            return rows
        while len(rows) < count and self._alive:
            choice = self._mixer.choose()
            source = self._alive[choice]
            row = self._readers[source].next_row()
            if row is None:
                if self._end(source):
                    break
                continue
            self._mixer.count(choice)
            rows.append((source, row))
        return rows

    def state(self) -> str:
        """Return the position of the next row, as a short string."""
        return pack([list(self._mixer.counts), list(self._ended), *(reader.state() for reader in self._readers)])

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()

    def _mix(self, counts: Sequence[int] | None) -> Mixer:
        """Return the mixer of the sources that still have rows."""
        passes = 1 if self._stop == "all_once" or all(self._ended) else 2
        self._alive = [source for source, ended in enumerate(self._ended) if ended < passes]
        return Mixer([self._weights[source] for source in self._alive] or [1.0], counts=counts)

    def _end(self, source: int) -> bool:
        """Mark the end of a source's pass; return whether that ends the epoch."""
        if self._stop == "first":
            return True
        if self._stop == "all" and self._readers[source].read_all_shards():
            return False
        empty = not self._readers[source].gave
        self._ended[source] = 2 if empty else 1
        if empty or self._stop == "all_once" or all(self._ended):
            self._mixer = self._mix(None)
        else:
            self._readers[source].begin_again()
        return not self._alive


def pack(value: Any) -> str:
    """Return a position as compressed JSON in base 85, whose characters JSON does not escape."""
    # Every checkpoint has a position for every group; plain JSON of 48 sources would exceed 4 KB.
    return b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode("ascii")


def unpack(text: Any) -> Any:
    """Return the packed value. Raise ResumeError if the string is damaged, which zlib's checksum shows."""
    try:
        return parse_json(zlib.decompress(b85decode(text)))
    except (ValueError, TypeError, zlib.error):
        raise damaged() from None


def damaged() -> ResumeError:
    """Return the error for an invalid position."""
    return ResumeError("the data position is damaged; continue from an older checkpoint")


def read_state(state: Any, sources: int) -> tuple[list[int] | None, list[int], list[Any]]:
    """Return the mixer's counts, the ended sources and each source's position, from a state or at the start."""
    if state is None:
        return None, [0] * sources, [None] * sources
    value = unpack(state)
    if not isinstance(value, list) or len(value) != sources + 2:
        raise damaged()
    counts, ended, *positions = value
    if not is_counts(counts) or not is_counts(ended) or len(ended) != sources or max(ended, default=0) > 2:
        raise damaged()
    return counts, ended, positions


def is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


class ShardsInTurn:
    """Rows of a group's shards of one source: a few shards are open, and a row is taken from each in turn."""

    def __init__(
        self, stream: Stream, *, group: int, num_groups: int, width: int, keys: Sequence[int] | None, state: Any = None
    ) -> None:
        """Start reading, or resume at `state`.

        Args:
            stream: The source.
            group: Index of the shard group.
            num_groups: Number of shard groups.
            width: Number of open shards.
            keys: Seed of the order; None for the order of the stream.
            state: The `state()` of an earlier reader with the same arguments.
        """
        self._stream, self._group, self._num_groups, self._width, self._keys = stream, group, num_groups, width, keys
        numbers, open_shards = parse_state(state, width) if state is not None else ([0] * 4, [])
        self._pass, self._gave, self._next, self._turn = numbers
        self._order = self._shuffled()
        if any(index >= len(self._order) for index in (self._next - 1, *(index for index, _ in open_shards))):
            raise damaged()
        self._open = [OpenShard(stream, int(self._order[index]), index, position) for index, position in open_shards]

    @property
    def gave(self) -> bool:
        """Whether there was any row."""
        return self._gave in (OWN_ROWS, ROWS_OF_ALL)

    def next_row(self) -> StreamRow | None:
        """Return the next row; None at the end of the pass."""
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
                self._gave |= OWN_ROWS
                return row._replace(is_repeated=True) if self._pass else row
            self._replace(self._turn)

    def read_all_shards(self) -> bool:
        """If there was no row, read the shards of all groups from now on; return False if that does not apply."""
        if self._gave != NO_ROWS or self._num_groups == 1:
            return False
        self._gave = NONE_OF_ALL
        self.begin_again()
        return True

    def begin_again(self) -> None:
        """Start the next pass, with the shards in another order."""
        self._pass, self._next, self._turn = self._pass + 1, 0, 0
        self._order = self._shuffled()

    def state(self) -> list[Any]:
        """Return pass, state of the source, next shard, turn, and index and position of each open shard."""
        open_shards = [part for shard in self._open for part in (shard.index, shard.position)]
        return [self._pass, self._gave, self._next, self._turn, *open_shards]

    def close(self) -> None:
        for shard in self._open:
            shard.close()

    def _replace(self, turn: int) -> None:
        """Replace a shard that has ended by the next one."""
        self._open[turn].close()
        if self._next < len(self._order):
            self._open[turn] = OpenShard(self._stream, int(self._order[self._next]), self._next, None)
            self._next += 1
        else:
            del self._open[turn]

    def _shuffled(self) -> np.ndarray:
        rng = np.random.default_rng([*self._keys, self._pass]) if self._keys is not None else None
        if self._gave in (NONE_OF_ALL, ROWS_OF_ALL):
            return assign_shards(self._stream.sizes, 1, rng=rng)[0]
        return assign_shards(self._stream.sizes, self._num_groups, rng=rng)[self._group]


def parse_state(state: Any, width: int) -> tuple[list[int], list[tuple[int, Position | None]]]:
    """Return the numbers and the open shards of a state. Raise ResumeError if it is malformed."""
    if not isinstance(state, list) or len(state) < 4 or len(state) % 2 or len(state) > 4 + 2 * width:
        raise damaged()
    numbers, indices = state[:4], state[4::2]
    if not is_counts([*numbers, *indices]) or numbers[1] > ROWS_OF_ALL:
        raise damaged()
    return numbers, list(zip(indices, state[5::2], strict=True))


class OpenShard:
    """A shard that is being read; it is opened when its first row is read."""

    def __init__(self, stream: Stream, shard: int, index: int, position: Position | None) -> None:
        """Start before the row at `position`.

        Args:
            stream: The stream that the shard belongs to.
            shard: Index of the shard in the stream.
            index: Index of the shard in the order of the group.
            position: Position of the next row; None for the first one.
        """
        self.index = index
        """Index of the shard in the order of the group."""
        self.position = position
        """Position of the next row."""
        self._rows = stream.read(shard, position)

    def next_row(self) -> StreamRow | None:
        item = next(self._rows, None)
        if item is None:
            return None
        self.position = item[1]
        return item[0]

    def close(self) -> None:
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()
