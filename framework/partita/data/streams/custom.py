"""Stream the rows of a user's class.

The class is created with the options of the source, and has one of

- `rows()`, an iterable of rows, or `__iter__`, a new iterator for each call. On resume, the rows before the position
  are read again.
- `read(shard, start)`, an iterator of (row, position) from the position `start`, None for the beginning; and, if there
  is more than one shard, `shards`, their number. A position is the one after its row: an integer, or a list of
  integers. Such a class resumes at once from any position, and may be endless.

Reading must be repeatable: the same shard from the same position yields the same rows. A row is a mapping of names to
values. `fingerprint`, a string, identifies the state of the data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from partita.data.contract import ShardedDataSource
from partita.data.formats.base import MAX_RAW, Position, StreamRow
from partita.data.rows import digest
from partita.data.sources.in_memory import check_iterable, content_of, iterable_of, make_source
from partita.data.sources.python_datasets import (
    MapStore,
    content_of_stream,
    is_hf_stream,
    is_map_style,
    name_of,
    refuse_iterator,
    rows_of_stream,
)
from partita.data.streams.base import Stream
from partita.data.streams.hub import DatasetsStream
from partita.data.user_objects import errors_of
from partita_schema.errors import DataError
from partita_schema.sections.sources import CustomSource


def open_custom_stream(source: CustomSource, *, folder: Path, least_shards: int) -> Stream:
    """Return the stream of a source's class, created with its options.

    Raises:
        ConfigError: If there is no such class.
        DataError: If it lacks the methods.
    """
    made, name = make_source(source, folder=folder), source.target.partition(":")[2]
    has_rows = callable(getattr(made, "rows", None)) and not callable(getattr(made, "read", None))
    with errors_of(source.target):
        rows = made.rows() if has_rows else made
    if is_hf_stream(rows):
        return DatasetsStream(rows, name=name, content=content_of_stream(rows), least_shards=least_shards)
    content = content_of(made, source)
    if is_map_style(rows):
        made = IndexedRows(MapStore(rows), shards=least_shards)
    return CustomStream(made, target=source.target, name=name, content=content, least_shards=least_shards)


@dataclass(frozen=True)
class PassedSource:
    """A dataset passed in Python that is read as a stream: a `datasets` or torch iterable, or a generator function."""

    dataset: Any

    def open(self, *, name: str, least_shards: int) -> Stream:
        """Return its stream. Raise DataError if it can be read only once."""
        if is_hf_stream(self.dataset):
            content = content_of_stream(self.dataset)
            return DatasetsStream(self.dataset, name=name, content=content, least_shards=least_shards)
        refuse_iterator(self.dataset)
        made, target = StreamRows(self.dataset), name_of(self.dataset)
        content = content_of_stream(self.dataset)
        return CustomStream(made, target=target, name=name, content=content, least_shards=least_shards)


class IndexedRows:
    """The rows of a map-style dataset, from any position at once; each shard has every n-th row."""

    def __init__(self, store: MapStore, *, shards: int) -> None:
        self._store = store
        self.shards = shards

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[Mapping[str, Any], Position]]:
        """Yield each row with the index of the next one of its shard, from the index `start`."""
        for index in range(start if isinstance(start, int) else shard, len(self._store), self.shards):
            yield self._store.row(index), index + self.shards


class StreamRows:
    """The rows of an iterable dataset or a generator function, from the first one in each pass."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def rows(self) -> Iterator[Any]:
        """Return all rows from the first one."""
        return rows_of_stream(self._dataset)


class CustomStream:
    """Rows of a user's class; if it has too few shards, several shards share one by taking every n-th row."""

    def __init__(self, made: Any, *, target: str, name: str, content: str, least_shards: int) -> None:
        """Stream an instance of a user's class.

        Args:
            made: The instance.
            target: Its class in messages.
            name: Name in the keys of rows.
            content: A hash of what is known about its rows.
            least_shards: Minimum number of shards.

        Raises:
            DataError: If it lacks the methods.
        """
        self._made, self._target = made, target
        self._by_shard = callable(getattr(self._made, "read", None))
        if not self._by_shard:
            check_iterable(self._made, self._target)
            self._refuse_shared()
        self._last: Iterable[Any] | None = None
        count = getattr(self._made, "shards", 1) if self._by_shard else 1
        if type(count) is not int or count < 1:
            raise DataError(f"{self._target}.shards is {count!r}; write the number of shards, at least 1")
        self._every = -(-least_shards // count)
        self.name = name
        self.fingerprint = digest(content, str(count))
        labels = [self.name] if count == 1 else [f"{self.name}/{shard}" for shard in range(count)]
        self.shards: Sequence[str] = [label for label in labels for _ in range(self._every)]
        """Label of each shard."""
        self.sizes: Sequence[float] = [1.0] * len(self.shards)
        """Shards count as equally long."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard; a position is the number of rows so far and the class's position after them."""
        own, first = divmod(shard, self._every)
        index, position = start if isinstance(start, list) else (0, None)
        for row, after in self._rows(own, index, position):
            index += 1
            if (index - 1) % self._every == first:
                yield self._row(row, shard, index), [index, after]

    def _rows(self, shard: int, index: int, position: Any) -> Iterator[tuple[Any, Any]]:
        with errors_of(self._target):
            yield from self._rows_of_class(shard, index, position)

    def _rows_of_class(self, shard: int, index: int, position: Any) -> Iterator[tuple[Any, Any]]:
        if not self._by_shard:
            yield from ((row, 0) for row in skip_rows(self._iterable(), index))
            return
        for item in cast("ShardedDataSource", self._made).read(shard, position):
            if not isinstance(item, tuple) or len(item) != 2:
                raise DataError(f"{self._target}.read gave a {type(item).__name__}; yield (row, position) for each row")
            if not is_position(item[1]):
                raise DataError(
                    f"{self._target}.read gave the position {item[1]!r}; write a whole number, or a list of them"
                )
            yield item

    def _iterable(self) -> Iterable[Any]:
        """Return all rows from the first one. Raise DataError if the class returns the iterator of an earlier call."""
        rows = iterable_of(self._made, self._target)
        if isinstance(rows, Iterator):
            if rows is self._last:
                raise DataError(shared(self._target, "rows"))
            self._last = rows
        return rows

    def _refuse_shared(self) -> None:
        """Raise DataError if every call of `__iter__` returns the same iterator."""
        if callable(getattr(self._made, "rows", None)):
            return
        first = iter(self._made)
        if iter(self._made) is first:
            raise DataError(shared(self._target, "__iter__"))

    def _row(self, row: Any, shard: int, number: int) -> StreamRow:
        if isinstance(row, Mapping):
            return StreamRow(shard, number, dict(row))
        reason = f"a row is a dict of column to value, this is a {type(row).__name__}"
        return StreamRow(shard, number, b"", reason, repr(row)[:MAX_RAW])


def shared(target: str, method: str) -> str:
    """Return the message for rows that can be read only once."""
    return (
        f"{target}.{method} gives the same iterator again, whose rows can be read only once; return a new iterator "
        "each time, beginning at the first row"
    )


def skip_rows(rows: Iterable[Any], passed: int) -> Iterator[Any]:
    """Yield the rows after the first `passed`; the skipped rows of a sequence are not accessed."""
    if isinstance(rows, Sequence):
        yield from (rows[index] for index in range(passed, len(rows)))
        return
    for index, row in enumerate(rows):
        if index >= passed:
            yield row


def is_position(value: Any) -> bool:
    """Return whether JSON preserves a position."""
    return type(value) is int or (isinstance(value, list) and all(map(is_position, value)))
