"""From a source of the file to a stream."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from partita.data.reading.records import MAX_ROW_BYTES
from partita.data.reading.sources import find_files
from partita.data.streams.base import Position, Stream, StreamRow
from partita.data.streams.custom import CustomStream
from partita.data.streams.files import FileStream
from partita.data.streams.hub import open_hub_stream
from partita_schema.sources import CustomSource, FileSource, HubSource, Source


def open_stream(source: Source, *, folder: Path, least_shards: int, max_row_bytes: int = MAX_ROW_BYTES) -> Stream:
    """The stream of a source, in at least so many shards; relative paths start at `folder`.

    Lines of more than `max_row_bytes` are bad rows. Nothing is read but what tells sizes. Raises DataError where there
    is nothing to read, and ConfigError for a class that is not there.
    """
    if isinstance(source, FileSource):
        paths = find_files(source.path, folder=folder)
        return FileStream(source.type, paths, name=source.path, least_shards=least_shards, max_row_bytes=max_row_bytes)
    if isinstance(source, HubSource):
        return open_hub_stream(source, folder=folder, least_shards=least_shards, max_row_bytes=max_row_bytes)
    if not isinstance(source, CustomSource):
        raise AssertionError(f"a source of type {source.type} is not streamed")
    return CustomStream(source, folder=folder, least_shards=least_shards)


class NamedStream:
    """A stream of a mix: its labels begin with its name, as keys of a mix do."""

    def __init__(self, stream: Stream, *, name: str) -> None:
        self._stream = stream
        self.name = name
        self.fingerprint = stream.fingerprint
        self.shards: Sequence[str] = [f"{name}/{label}" for label in stream.shards]
        """Label of each shard."""
        self.sizes = stream.sizes

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Rows of a shard from a position on."""
        return self._stream.read(shard, start)
