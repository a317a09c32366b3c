"""Read files that can only be read from their start: JSON arrays and dialogues."""

from collections.abc import Iterator

from partita.data.sources.opened import opened
from partita.data.sources.readers import READERS
from partita.data.streams.base import Position, StreamRow
from partita.data.streams.csv import stream_row
from partita.data.streams.file_slices import FileSlice


def read_whole(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice; a position is the number of rows so far, which are read again on resume."""
    passed = start if isinstance(start, int) else 0
    with opened(piece.path, piece.label) as stream:
        for index, record in enumerate(READERS[piece.kind](stream, piece.label, piece.max_row_bytes)):
            if index >= passed and index % piece.parts == piece.part:
                yield stream_row(record, shard), index + 1
