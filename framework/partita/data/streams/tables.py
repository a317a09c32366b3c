"""Rows of Parquet and Arrow files, group by group."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.reading.arrow_rows import UnreadableRow, rows_of
from partita.data.reading.opened import opened
from partita.data.streams.base import Position, StreamRow
from partita.data.streams.file_slices import FileSlice
from partita_schema.errors import DataError

if TYPE_CHECKING:
    import pyarrow

DECODED = 512
"""Rows that are decoded at a time."""


def read_parquet(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Rows of a range; the position is the row group, and the rows of it so far.

    Of a group in which the range begins or ends, no more is decoded than its rows up to the end.
    """
    import pyarrow.parquet

    with opened(piece.path, piece.label) as stream, readable(piece):
        file = pyarrow.parquet.ParquetFile(stream)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
        begin, end = piece.start or 0, firsts[-1] if piece.end is None else piece.end
        first, passed = place_of(start, 0)
        for group in range(first, len(sizes)):
            begun, ended = firsts[group : group + 2]
            if begun < end and ended > begin:
                batches = file.iter_batches(batch_size=DECODED, row_groups=[group])
                passed = max(passed, begin - begun)
                yield from group_rows(
                    batches, piece, shard, group=group, first=begun, passed=passed, last=min(ended, end) - begun
                )
            passed = 0


def read_arrow(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Rows of an Arrow file or stream; the position is the record batch, and the rows of it so far."""
    with opened(piece.path, piece.label) as stream, readable(piece):
        group, passed = place_of(start, 0)
        first = 0
        for number, batch in enumerate(record_batches(stream, piece)):
            if number >= group:
                slices = (batch.slice(place, DECODED) for place in range(0, batch.num_rows, DECODED))
                yield from group_rows(slices, piece, shard, group=number, first=first, passed=passed)
                passed = 0
            first += batch.num_rows


def record_batches(stream: Any, piece: FileSlice) -> Iterator["pyarrow.RecordBatch"]:
    """Batches of either form of Arrow's files; local ones are memory mapped."""
    import pyarrow

    source = stream if "://" in piece.path else pyarrow.memory_map(piece.path)
    try:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)
    finally:
        source.close()


def place_of(start: Position | None, first: int) -> tuple[int, int]:
    return (start[0], start[1]) if isinstance(start, list) else (first, 0)


def group_rows(
    batches: Iterator["pyarrow.RecordBatch"],
    piece: FileSlice,
    shard: int,
    *,
    group: int,
    first: int,
    passed: int,
    last: int | None = None,
) -> Iterator[tuple[StreamRow, Position]]:
    """Rows of a group behind the first `passed`, before the one at `last`; only those that the piece keeps are made."""
    place = 0
    for batch in batches:
        if last is not None and place >= last:
            return
        rows = np.arange(place, place + batch.num_rows)
        kept = rows[(rows >= passed) & ((first + rows) % piece.parts == piece.part)]
        if last is not None:
            kept = kept[kept < last]
        chosen = batch if len(kept) == len(rows) else batch.take(kept - place)
        for row, values in zip(kept.tolist(), rows_of(chosen), strict=True):
            yield stream_row(values, shard, first + row + 1), [group, row + 1]
        place += batch.num_rows


def stream_row(values: dict[str, Any] | UnreadableRow, shard: int, number: int) -> StreamRow:
    if isinstance(values, UnreadableRow):
        return StreamRow(shard, number, b"", values.reason, values.raw)
    return StreamRow(shard, number, values)


@contextmanager
def readable(piece: FileSlice) -> Iterator[None]:
    """Raise DataError for what is no such file."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        said = " ".join(str(error).split())[:300]
        raise DataError(f"{piece.label} cannot be read as {piece.kind}: {said}") from error


def row_pieces(path: str, label: str, pieces: int) -> list[tuple[int, int]]:
    """A Parquet file's rows in ranges of like length."""
    import pyarrow.parquet

    with opened(path, label) as stream, readable(FileSlice(path, label, "parquet")):
        rows = pyarrow.parquet.ParquetFile(stream).metadata.num_rows
    marks = [rows * part // pieces for part in range(pieces + 1)]
    return list(pairwise(marks))
