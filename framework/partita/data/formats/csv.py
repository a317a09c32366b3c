"""Read rows of CSV and TSV files; every cell remains text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from partita.data.formats.base import (
    WRITE_ENCODING,
    FileFormat,
    FileOptions,
    FileSlice,
    Position,
    SourceRecord,
    StreamRow,
    bad,
    column_names,
    dump,
    opened,
    seek,
    stream_row,
)
from partita.data.formats.csv_rows import CsvRow, CsvRows
from partita.data.formats.dialect import DELIMITERS, Dialect, differences, opened_dialect
from partita.data.formats.text_files import open_text
from partita.data.rows import Rows
from partita_schema.common.text import counted
from partita_schema.errors import DataError, shortened

EXCEL_NOTE = re.compile(r"sep=.?", re.IGNORECASE)
"""A first line that only tells Excel the delimiter, without the delimiters in it."""


def read_cells(
    stream: BinaryIO, name: str, max_row_bytes: int, *, default: str, options: FileOptions
) -> Iterator[SourceRecord]:
    """Yield the rows under a header, or all if the options name the columns. Every cell remains text.

    Args:
        stream: The file.
        name: Name of the file, for errors.
        max_row_bytes: Maximum size of a row.
        default: Delimiter of the format.
        options: What the configuration says; delimiter, quoting and encoding are else detected from the rows.
    """
    whole, dialect = opened_dialect(stream, name, default=default, options=options)
    header = options.header
    delimiter, quoting = dialect.delimiter, dialect.quoting
    for row in CsvRows(whole, delimiter=delimiter, quoting=quoting, max_row_bytes=max_row_bytes):
        if header is None:
            header = checked_header(row, name, options)
        else:
            yield csv_record(row, header, delimiter)


def open_cells(
    default: str, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions
) -> Rows:
    """Return the rows of tables by index.

    Args:
        default: Delimiter of the format.
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Maximum size of a row in bytes.
        options: What the configuration says about them.

    Raises:
        DataError: If a file cannot be read, or no row is good.
    """
    read = partial(read_cells, default=default, options=options)
    return open_text(read, paths, names, max_row_bytes=max_row_bytes, options=options)


def checked_header(row: CsvRow, name: str, options: FileOptions) -> tuple[str, ...]:
    """Return the column names. Raise DataError if the first row cannot be a header, or uses another delimiter."""
    if row.reason:
        raise DataError(f"{name}: the header cannot be read: {row.reason}")
    if EXCEL_NOTE.fullmatch("".join(row.cells)):
        raise DataError(f"{name}: its first line only tells Excel the delimiter (sep=); remove the line")
    names = column_names(row.cells, name)
    if not_text := next((cell for cell in names if not is_utf8(cell)), None):
        raise DataError(f"{name}: the header is not UTF-8 ({shortened(not_text)!r}); {WRITE_ENCODING}")
    if options.delimiter is None and (delimiter := other_separator(names)):
        raise DataError(
            f"{name} has a single column, {shortened(names[0])!r}; its delimiter may be {delimiter}, but the rows do "
            "not have as many cells as the header; write its delimiter at the source, such as delimiter: ','"
        )
    return names


def other_separator(columns: Sequence[str]) -> str | None:
    """Return the name of the separator of cells that were all read as one column; None if there is no likely one."""
    if len(columns) != 1:
        return None
    return next((word for mark, word in DELIMITERS.items() if mark != "," and mark in columns[0]), None)


def is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def csv_record(row: CsvRow, header: Sequence[str], delimiter: str) -> SourceRecord:
    """Return the row as a JSON object, or the reason why it is bad."""
    if row.reason:
        return bad(row.number, row.reason, row.cells[0])
    if len(row.cells) != len(header):
        reason = f"{counted(len(row.cells), 'cell')}, the header has {len(header)}"
        return bad(row.number, reason, delimiter.join(row.cells))
    try:
        return SourceRecord(row.number, dump(dict(zip(header, row.cells, strict=True))), tuple(header))
    except UnicodeEncodeError:
        return bad(row.number, f"not UTF-8; {WRITE_ENCODING}", delimiter.join(row.cells))


def read_cells_slice(
    default: str, file_slice: FileSlice, shard: int, start: Position | None
) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows under a header, as the reader of whole files does.

    A position is the byte after the row, the number of lines and, unless the slice is the whole file, the number of
    rows so far. In files that are compressed or not UTF-8, the bytes before a position are read again.

    Args:
        default: Delimiter of the format.
        file_slice: The file slice.
        shard: Index of the shard.
        start: Position to start at.
    """
    offset, passed, index = (*start, 0)[:3] if isinstance(start, list) else (0, 0, 0)
    header = read_header(file_slice, default)
    if header is None:
        return
    names, head, dialect = header
    if not offset:
        offset, passed = head
    first, every, limit = file_slice.first, file_slice.every, file_slice.max_row_bytes
    options = replace(file_slice.options, encoding=dialect.encoding)
    with opened(file_slice.path, file_slice.label, options=options) as stream:
        seek(stream, offset)
        rows = CsvRows(
            stream,
            delimiter=dialect.delimiter,
            quoting=dialect.quoting,
            max_row_bytes=limit,
            offset=offset,
            number=passed + 1,
            block_bytes=file_slice.file_sizes.block_bytes,
        )
        for row in rows:
            index += 1
            if every > 1 and (index - 1) % every != first:
                continue
            after = [row.end, row.next_number - 1]
            shown = cells_row(row, names, shard=shard, delimiter=dialect.delimiter)
            yield shown, after if every == 1 else [*after, index]


def read_header(file_slice: FileSlice, default: str) -> tuple[Sequence[str], tuple[int, int], Dialect] | None:
    """Return the column names, the bytes and lines before the first row, and the dialect; None for an empty file."""
    label, options = file_slice.label, file_slice.options
    with opened(file_slice.path, label, options=options) as stream:
        whole, dialect = opened_dialect(stream, label, default=default, options=options)
        if options.header is not None:
            return options.header, (0, 0), dialect
        limit, block_bytes = file_slice.max_row_bytes, file_slice.file_sizes.block_bytes
        delimiter, quoting = dialect.delimiter, dialect.quoting
        for row in CsvRows(whole, delimiter=delimiter, quoting=quoting, max_row_bytes=limit, block_bytes=block_bytes):
            return checked_header(row, label, options), (row.end, row.next_number - 1), dialect
    return None


def cells_row(row: CsvRow, names: Sequence[str], *, shard: int, delimiter: str) -> StreamRow:
    """Return a row of cells as a row of a stream.

    Args:
        row: The cells.
        names: The column names.
        shard: Index of the shard.
        delimiter: Separator of the cells, for errors.
    """
    if not row.reason and len(row.cells) == len(names) and "".join(row.cells).isascii():
        return StreamRow(shard, row.number, dict(zip(names, row.cells, strict=True)))
    return stream_row(csv_record(row, names, delimiter), shard)


def found_in_file(file_slice: FileSlice) -> str:
    """Return the detected options of a table that differ from the default of its format; empty for other formats."""
    default = DEFAULT_DELIMITERS.get(file_slice.kind)
    if default is None:
        return ""
    with opened(file_slice.path, file_slice.label, options=file_slice.options) as stream:
        _, dialect = opened_dialect(stream, file_slice.label, default=default, options=file_slice.options)
    return differences(dialect, default, file_slice.options)


DEFAULT_DELIMITERS = {"csv": ",", "tsv": "\t"}
CSV, TSV = (
    FileFormat(
        name,
        (f".{name}",),
        open=partial(open_cells, delimiter),
        read_slice=partial(read_cells_slice, delimiter),
        stdin=True,
    )
    for name, delimiter in DEFAULT_DELIMITERS.items()
)
