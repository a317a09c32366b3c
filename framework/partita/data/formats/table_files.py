"""Parquet and Arrow files: opening them, and why one cannot be read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from partita.data.formats.arrow_rows import check_names
from partita.data.formats.base import FileSlice, opened
from partita.data.formats.signatures import other_content, refuse_pointer
from partita_schema.errors import DataError

if TYPE_CHECKING:
    import pyarrow

MARKS = {"parquet": b"PAR1", "arrow": b"ARROW1"}
"""First and last bytes of a file, by format."""
STREAM_MARK = b"\xff\xff\xff\xff"
"""First bytes of an Arrow stream."""
NUM_FIRST = 64
"""Number of bytes at the start of a file that are examined if it cannot be read."""


def open_parquet(stream: Any, file_slice: FileSlice) -> "pyarrow.parquet.ParquetFile":
    """Return an open Parquet file. Raise DataError if two of its columns have the same name."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    check_names(file.schema_arrow.names, file_slice.label)
    return file


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
