"""Read the rows of Parquet and Arrow files, one row group at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.contract import Position
from partita.data.sources.lines import opened
from partita.data.sources.tables import UnreadableRow, rows_of
from partita.data.streams.base import FileSlice, StreamRow
from partita_schema.errors import DataError

if TYPE_CHECKING:
    import pyarrow

DECODED = 512
"""Rows that are decoded at a time."""


def read_parquet(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice; a position is the row group and the number of its rows so far.

    A group that only partly belongs to the slice is decoded only up to the end of the slice.
    """
    import pyarrow.parquet

    with opened(piece.path, piece.label) as stream, readable(piece):
        file = pyarrow.parquet.ParquetFile(stream)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
        begin, end = piece.start or 0, firsts[-1] if piece.end is None else piece.end
        first, passed = group_and_row(start, 0)
        for group in range(first, len(sizes)):
            group_start, group_end = firsts[group : group + 2]
            if group_start < end and group_end > begin:
                batches = file.iter_batches(batch_size=DECODED, row_groups=[group])
                passed = max(passed, begin - group_start)
                yield from group_rows(
                    batches,
                    piece,
                    shard,
                    group=group,
                    first=group_start,
                    passed=passed,
                    last=min(group_end, end) - group_start,
                )
            passed = 0


def read_arrow(piece: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of an Arrow file or stream; a position is the record batch and the number of its rows so far."""
    with opened(piece.path, piece.label) as stream, readable(piece):
        group, passed = group_and_row(start, 0)
        first = 0
        for number, batch in enumerate(record_batches(stream, piece)):
            if number >= group:
                slices = (batch.slice(index, DECODED) for index in range(0, batch.num_rows, DECODED))
                yield from group_rows(slices, piece, shard, group=number, first=first, passed=passed)
                passed = 0
            first += batch.num_rows


def record_batches(stream: Any, piece: FileSlice) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the record batches of an Arrow file or stream; local files are memory-mapped."""
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


def group_and_row(start: Position | None, first: int) -> tuple[int, int]:
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
    """Yield the rows of a group after the first `passed`; only rows that the slice keeps are decoded.

    Args:
        batches: The record batches of the group.
        piece: The file slice.
        shard: Index of the shard.
        group: Index of the group.
        first: Number of rows in the file before the group.
        passed: Number of rows to skip.
        last: Index of the first row after the slice; None for all rows.
    """
    batch_start = 0
    for batch in batches:
        if last is not None and batch_start >= last:
            return
        rows = np.arange(batch_start, batch_start + batch.num_rows)
        selected = rows[(rows >= passed) & ((first + rows) % piece.parts == piece.part)]
        if last is not None:
            selected = selected[selected < last]
        chosen = batch if len(selected) == len(rows) else batch.take(selected - batch_start)
        for row, values in zip(selected.tolist(), rows_of(chosen), strict=True):
            yield stream_row(values, shard, first + row + 1), [group, row + 1]
        batch_start += batch.num_rows


def stream_row(values: dict[str, Any] | UnreadableRow, shard: int, number: int) -> StreamRow:
    if isinstance(values, UnreadableRow):
        return StreamRow(shard, number, b"", values.reason, values.raw)
    return StreamRow(shard, number, values)


@contextmanager
def readable(piece: FileSlice) -> Iterator[None]:
    """Raise DataError if a file does not have its format."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{piece.label} cannot be read as {piece.kind}: {reason}") from error


def row_pieces(path: str, label: str, pieces: int) -> list[tuple[int, int]]:
    """Return row ranges of similar length in a Parquet file."""
    import pyarrow.parquet

    with opened(path, label) as stream, readable(FileSlice(path, label, "parquet")):
        rows = pyarrow.parquet.ParquetFile(stream).metadata.num_rows
    marks = [rows * part // pieces for part in range(pieces + 1)]
    return list(pairwise(marks))
