"""Open a source of the configuration as a stream."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from partita.data.sources.records import MAX_ROW_BYTES
from partita.data.sources.sources import find_files
from partita.data.streams.base import Position, Stream, StreamRow
from partita.data.streams.custom import CustomStream
from partita.data.streams.files import FileStream
from partita.data.streams.hub import open_hub_stream
from partita_schema.sources import CustomSource, FileSource, HubSource, Source


def open_stream(source: Source, *, folder: Path, least_shards: int, max_row_bytes: int = MAX_ROW_BYTES) -> Stream:
    """Return the stream of a source. Nothing is read except file sizes and metadata.

    Args:
        source: The source.
        folder: Base of relative paths.
        least_shards: Minimum number of shards.
        max_row_bytes: Maximum size of a line in bytes; longer ones are bad rows.

    Raises:
        DataError: If there is nothing to read.
        ConfigError: If a user's class does not exist.
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
    """A stream of a mix; its labels are prefixed with its name, as the keys of a mix are."""

    def __init__(self, stream: Stream, *, name: str) -> None:
        self._stream = stream
        self.name = name
        self.fingerprint = stream.fingerprint
        self.shards: Sequence[str] = [f"{name}/{label}" for label in stream.shards]
        """Label of each shard."""
        self.sizes = stream.sizes

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard from a position on."""
        return self._stream.read(shard, start)
