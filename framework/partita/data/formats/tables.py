"""Read Parquet and Arrow: by index memory-mapped by `datasets`, in order one row group at a time.

Arrow may hold dates of 292 billion years, unvalidated text, and time zones that are not installed. Python has no values
for them and raises an exception for a whole batch. Here only such a row is bad, and the others are read.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.formats.base import MAX_RAW, FileFormat, FileOptions, FileSlice, Position, StreamRow, opened
from partita.data.formats.signatures import other_content, refuse_pointer
from partita.data.rows import ArrowStore, BadRow, DatasetStore, RowKeys, Rows, Store, digest, hash_rows
from partita_schema.common.text import first_repeated
from partita_schema.errors import DataError, shortened

if TYPE_CHECKING:
    import datasets
    import pyarrow

BATCH = 4096
"""Rows that are checked at a time."""
DECODED = 512
"""Rows that are decoded at a time."""
MARKS = {"parquet": b"PAR1", "arrow": b"ARROW1"}
"""First and last bytes of a file, by format."""
STREAM_MARK = b"\xff\xff\xff\xff"
"""First bytes of an Arrow stream."""
NUM_FIRST = 64
"""Number of bytes at the start of a file that are examined if it cannot be read."""
UNKNOWN_SPLIT = re.compile(r"Unknown split \"[^\"]*\"\. Should be one of \[(.*)\]\.")
"""How `datasets` says that a folder or a Hub dataset has other splits."""


@dataclass(frozen=True)
class UnreadableRow:
    """A row whose values Python cannot represent."""

    reason: str
    raw: str
    """The values that could be read, truncated."""


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a value that Python cannot represent."""
    import pyarrow

    return ValueError, OverflowError, TypeError, pyarrow.ArrowException


def rows_of_batch(batch: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any] | UnreadableRow]:
    """Return the rows of a batch, each as a mapping if all of its values can be read."""
    try:
        batch.validate(full=True)  # invalid offsets would end the process with a segmentation fault
        rows: list[dict[str, Any] | UnreadableRow] = list(batch.to_pylist())
    except failures():
        return [row_of(batch.slice(index, 1)) for index in range(batch.num_rows)]
    return rows


def row_of(batch: "pyarrow.RecordBatch | pyarrow.Table") -> dict[str, Any] | UnreadableRow:
    """Return the only row of a batch."""
    values: dict[str, Any] = {}
    reason = ""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
            values[name] = column.to_pylist()[0]
        except failures() as error:
            reason = reason or f"column {name}: {column.type} has no value in Python: {' '.join(str(error).split())}"
    return UnreadableRow(reason[:MAX_RAW], repr(values)[:MAX_RAW]) if reason else values


def unreadable_rows(batches: "Iterator[pyarrow.Table]") -> Iterator[tuple[int, UnreadableRow]]:
    """Yield the unreadable rows of all batches, with their index.

    Columns whose values always have a Python equivalent are not checked.
    """
    first = 0
    for batch in batches:
        suspects = batch.select([index for index, field in enumerate(batch.schema) if is_suspect(field.type)])
        if not all(map(is_readable, suspects.columns)):
            for index, row in enumerate(rows_of_batch(batch)):
                if isinstance(row, UnreadableRow):
                    yield first + index, row
        first += batch.num_rows


def is_suspect(kind: "pyarrow.DataType") -> bool:
    """Return whether a type has values that Python cannot represent: dates and times, and text."""
    import pyarrow

    types = pyarrow.types
    inner = (
        [kind.value_type] if types.is_dictionary(kind) else [kind.field(index).type for index in range(kind.num_fields)]
    )
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return types.is_temporal(kind) or text or any(map(is_suspect, inner))


def is_readable(column: "pyarrow.ChunkedArray") -> bool:
    """Return whether all values of a column can be read."""
    import pyarrow
    import pyarrow.compute

    try:
        column.validate(full=True)
        if pyarrow.types.is_temporal(column.type):
            ends = pyarrow.compute.min_max(column)
            ends["min"].as_py(), ends["max"].as_py()
        elif column.type.num_fields or pyarrow.types.is_dictionary(column.type):
            column.to_pylist()
    except failures():
        return False
    return True


def open_tables(
    kind: str, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions
) -> Rows:
    """Return the rows of Parquet or Arrow files.

    Args:
        kind: Name of the format, and of its builder in `datasets`.
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Has no effect, since rows have no lines.
        options: Have no effect.
    """
    import datasets
    import pyarrow

    slices = [FileSlice(path, name, kind) for path, name in zip(paths, names, strict=True)]
    filled = [file_slice for file_slice in slices if has_rows(file_slice)]
    parts: list[Any]
    if all(map(has_known_types, filled)):
        parts = [load(kind, data_files=[one.path], split="train", label=one.label) for one in filled]
        join = datasets.concatenate_datasets
    else:
        parts = [read_mapped(one) for one in filled]
        join = partial(pyarrow.concat_tables, promote_options="default")
    sizes_by_name = {one.label: len(part) for one, part in zip(filled, parts, strict=True)}
    sizes = [sizes_by_name.get(name, 0) for name in names]
    if not any(sizes):
        raise DataError(f"{', '.join(names[:3])} has no rows")
    try:
        table = join(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError) as error:
        raise DataError(f"the files {', '.join(names[:3])} have different columns: {error}") from None
    files = np.repeat(np.arange(len(names)), sizes)
    numbers = np.concatenate([np.arange(1, size + 1) for size in sizes])
    keys = RowKeys(names, files, numbers)
    hashes = [hash_file(path) if "://" not in path else "" for path in paths]
    return readable_rows(table, keys, content=digest(*names, *hashes) if all(hashes) else None)


def has_rows(file_slice: FileSlice) -> bool:
    """Return whether a file has rows; `datasets` cannot read one without. Files that are not local are not checked.

    Raises:
        DataError: If the file does not have its format, or two of its columns have the same name.
    """
    if "://" in file_slice.path:
        return True
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        if file_slice.kind == "parquet":
            return bool(open_parquet(stream, file_slice).metadata.num_rows)
        return any(batch.num_rows for batch in record_batches(stream, file_slice))


def has_known_types(file_slice: FileSlice) -> bool:
    """Return whether `datasets` can represent the types of all columns of a file with rows.

    Files that are not local are not checked.
    """
    import datasets

    if "://" in file_slice.path:
        return True
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        if file_slice.kind == "parquet":
            schema = open_parquet(stream, file_slice).schema_arrow
        else:
            schema = next(record_batches(stream, file_slice)).schema
    try:
        datasets.Features.from_arrow_schema(schema)
    except Exception:  # a ValueError for an unknown type, or anything for damaged metadata of `datasets`
        return False
    return True


def read_mapped(file_slice: FileSlice) -> "pyarrow.Table":
    """Return the rows of a file without `datasets`, mapped from a copy in the temporary folder of the system.

    The copy has no name any more once it is mapped, and its space is free when the rows are.
    """
    import pyarrow

    with (
        tempfile.TemporaryDirectory(prefix="partita-") as folder,
        opened(file_slice.path, file_slice.label) as stream,
        readable(file_slice),
    ):
        copy = f"{folder}/rows.arrow"
        if file_slice.kind == "parquet":
            batches = open_parquet(stream, file_slice).iter_batches(batch_size=BATCH)
        else:
            batches = record_batches(stream, file_slice)
        first = next(batches)
        with pyarrow.OSFile(copy, "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        return pyarrow.ipc.open_stream(pyarrow.memory_map(copy)).read_all()


def open_parquet(stream: Any, file_slice: FileSlice) -> "pyarrow.parquet.ParquetFile":
    """Return an open Parquet file. Raise DataError if two of its columns have the same name."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    check_names(file.schema_arrow.names, file_slice.label)
    return file


def check_names(names: Sequence[str], label: str) -> None:
    """Raise DataError if two columns have the same name: rows would keep the values of one of them."""
    twice = first_repeated(names)
    if twice is not None:
        raise DataError(f"{label} has two columns named {shortened(twice)!r}; rename one")


def readable_rows(table: "datasets.Dataset | pyarrow.Table", keys: RowKeys, *, content: str | None) -> Rows:
    """Return the rows that Python can represent; the others are bad rows. `content` is a hash, if one is known."""
    import pyarrow

    store: Store
    if isinstance(table, pyarrow.Table):
        store, batches = ArrowStore(table), iter(table.to_batches(max_chunksize=BATCH))
    else:
        store, batches = DatasetStore(table), table.with_format("arrow").iter(batch_size=BATCH)
    unreadable = dict(unreadable_rows(batches))
    bad = [
        BadRow(str(keys[index]), *keys.location(index), row.reason, row.raw, num_before=index - number)
        for number, (index, row) in enumerate(unreadable.items())
    ]
    if len(bad) == len(table):
        raise DataError(f"{keys.names[0]} has no good row: {bad[0].key}: {bad[0].reason}")
    if not bad:
        fingerprint = hash_rows(store) if content is None else content
        return Rows(store, columns=table.column_names, keys=keys, fingerprint=fingerprint)
    good = np.setdiff1d(np.arange(len(table)), list(unreadable))
    fingerprint = hash_rows(store, good) if content is None else content
    return Rows(store, columns=table.column_names, keys=keys.take(good), fingerprint=fingerprint, bad=bad, index=good)


def hash_file(path: str) -> str:
    with Path(path).open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def load(
    path: str,
    *,
    label: str,
    split: str,
    data_files: list[str] | None = None,
    name: str | None = None,
    revision: str | None = None,
    remote: bool = False,
) -> "datasets.Dataset":
    """Load a table with `datasets.load_dataset`, without its output.

    Local files use a cache that is deleted afterwards; the table stays mapped. Hub datasets use the usual cache, which
    tracks their commits.

    Args:
        path: Name of a builder, of a Hub dataset or of a folder.
        label: Name in messages.
        split: The split.
        data_files: Files to read, for a builder.
        name: Subset of a Hub dataset.
        revision: Commit, branch or tag of a Hub dataset.
        remote: Whether `path` is on the Hub.

    Raises:
        DataError: If the table cannot be read.
    """
    import datasets

    with quiet_datasets(), tempfile.TemporaryDirectory(prefix="partita-") as cache:
        try:
            table = datasets.load_dataset(
                path,
                name,
                split=split,
                data_files=data_files,
                revision=revision,
                cache_dir=None if remote else cache,
            )
        except Exception as error:  # pyarrow, fsspec and the Hub client raise exceptions without a common base
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())[:500]
            if there := UNKNOWN_SPLIT.fullmatch(reason):
                splits = there[1].replace("'", "")
                raise DataError(
                    f"{label} has no split {split}, only {splits}; write {{type: hub, name: {label}, split: ...}}"
                ) from error
            raise DataError(f"{label} cannot be read: {type(cause).__name__}: {reason}") from error
    return table


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Disable progress bars and log messages of `datasets` while in this context."""
    import datasets

    shown, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()


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


def record_batches(stream: Any, file_slice: FileSlice) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the record batches of an Arrow file or stream; local files are memory-mapped."""
    import pyarrow

    source = stream if "://" in file_slice.path else pyarrow.memory_map(file_slice.path)
    try:
        if source.read(6) == b"ARROW1":
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            check_names(file.schema.names, file_slice.label)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
            check_names(batches.schema.names, file_slice.label)
            yield from batches
    finally:
        source.close()


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


def table_row(values: dict[str, Any] | UnreadableRow, shard: int, number: int) -> StreamRow:
    """Return the values of a row as a row of a shard."""
    if isinstance(values, UnreadableRow):
        return StreamRow(shard, number, b"", values.reason, values.raw)
    return StreamRow(shard, number, values)


@contextmanager
def readable(file_slice: FileSlice) -> Iterator[None]:
    """Raise DataError if a file does not have its format."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the operating system, not of pyarrow
            raise
        reason = why_unreadable(file_slice, error)
        raise DataError(f"{file_slice.label} cannot be read as {file_slice.kind}: {reason}") from error


def why_unreadable(file_slice: FileSlice, error: Exception) -> str:
    """Return in plain words why a file does not have its format, from its first bytes.

    Of a local file the last bytes are read too; others may not be able to seek.
    """
    mark = MARKS[file_slice.kind]
    with opened(file_slice.path, file_slice.label) as stream:
        start = stream.read(NUM_FIRST)
        end = mark
        if "://" not in file_slice.path and len(start) > len(mark):
            stream.seek(-len(mark), os.SEEK_END)
            end = stream.read()
    refuse_pointer(start, file_slice.label)
    if not start:
        return "it is empty"
    is_stream = file_slice.kind == "arrow" and start.startswith(STREAM_MARK)
    if not start.startswith(mark) and not is_stream:
        return other_content(start)
    if not is_stream and (len(start) <= len(mark) or end != mark):
        return "its end is missing; write or copy it again"
    return f"it is damaged or cut off ({' '.join(str(error).split())[:300]})"


def row_ranges(path: str, label: str, number: int) -> list[tuple[int, int]]:
    """Return row ranges of similar length in a Parquet file."""
    file_slice = FileSlice(path, label, "parquet")
    with opened(path, label) as stream, readable(file_slice):
        rows = open_parquet(stream, file_slice).metadata.num_rows
    marks = [rows * index // number for index in range(number + 1)]
    return list(pairwise(marks))


PARQUET = FileFormat(
    "parquet",
    (".parquet",),
    open=partial(open_tables, "parquet"),
    read_slice=read_parquet,
    row_ranges=row_ranges,
    hub_builder="parquet",
)
ARROW = FileFormat("arrow", (".arrow",), open=partial(open_tables, "arrow"), read_slice=read_arrow, hub_builder="arrow")
