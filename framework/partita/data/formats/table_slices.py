"""Read slices of Parquet and Arrow files in order, one row group or record batch at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from partita.data.formats.arrow_rows import rows_of_batch, table_row
from partita.data.formats.base import FileSlice, Position, StreamRow, opened
from partita.data.formats.table_files import open_parquet, readable, record_batches

if TYPE_CHECKING:
    import pyarrow

DECODED = 512
"""Rows that are decoded at a time."""


def read_parquet(file_slice: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a slice; a position is the row group and the number of its rows so far.

    A group that only partly belongs to the slice is decoded only up to the end of the slice.
    """
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        file = open_parquet(stream, file_slice)
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
        begin, end = file_slice.start or 0, firsts[-1] if file_slice.end is None else file_slice.end
        first, passed = group_and_row(start)
        for group in range(first, len(sizes)):
            group_start, group_end = firsts[group : group + 2]
            if group_start < end and group_end > begin:
                batches = file.iter_batches(batch_size=DECODED, row_groups=[group])
                passed = max(passed, begin - group_start)
                yield from group_rows(
                    batches,
                    file_slice,
                    shard,
                    group=group,
                    first=group_start,
                    passed=passed,
                    last=min(group_end, end) - group_start,
                )
            passed = 0


def read_arrow(file_slice: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of an Arrow file or stream; a position is the record batch and the number of its rows so far."""
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        group, passed = group_and_row(start)
        first = 0
        for number, batch in enumerate(record_batches(stream, file_slice)):
            if number >= group:
                slices = (batch.slice(index, DECODED) for index in range(0, batch.num_rows, DECODED))
                yield from group_rows(slices, file_slice, shard, group=number, first=first, passed=passed)
                passed = 0
            first += batch.num_rows


def group_and_row(start: Position | None) -> tuple[int, int]:
    return (start[0], start[1]) if isinstance(start, list) else (0, 0)


def group_rows(
    batches: Iterator["pyarrow.RecordBatch"],
    file_slice: FileSlice,
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
        file_slice: The file slice.
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
        selected = rows[(rows >= passed) & ((first + rows) % file_slice.every == file_slice.first)]
        if last is not None:
            selected = selected[selected < last]
        chosen = batch if len(selected) == len(rows) else batch.take(selected - batch_start)
        for row, values in zip(selected.tolist(), rows_of_batch(chosen), strict=True):
            yield table_row(values, shard, first + row + 1), [group, row + 1]
        batch_start += batch.num_rows
