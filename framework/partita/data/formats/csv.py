"""Read rows of CSV and TSV files; every cell remains text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import BinaryIO

from partita.data.formats.base import (
    MAX_ROW_BYTES,
    SAVE_AS_UTF8,
    UTF16_MARKS,
    FileFormat,
    FileSlice,
    Position,
    SourceRecord,
    StreamRow,
    bad,
    dump,
    opened,
    seek,
    stream_row,
)
from partita.data.formats.csv_rows import CsvRow, CsvRows
from partita.data.formats.text_files import open_text
from partita_schema.common.text import counted
from partita_schema.errors import DataError, shortened

SEPARATORS = {";": "';'", "\t": "a tab", "|": "'|'"}
"""Separators of files that are called CSV, besides commas, with their names in messages."""


def read_csv(stream: BinaryIO, name: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[SourceRecord]:
    """Yield the rows under a header, separated by commas. Every cell remains text."""
    return read_cells(stream, name, delimiter=",", max_row_bytes=max_row_bytes)


def read_tsv(stream: BinaryIO, name: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[SourceRecord]:
    """Yield the rows under a header, separated by tabs. Every cell remains text."""
    return read_cells(stream, name, delimiter="\t", max_row_bytes=max_row_bytes)


def read_cells(stream: BinaryIO, name: str, *, delimiter: str, max_row_bytes: int) -> Iterator[SourceRecord]:
    """Yield the rows under a header.

    Args:
        stream: The file.
        name: Name of the file, for errors.
        delimiter: Separator of the cells.
        max_row_bytes: Maximum size of a row.
    """
    header: tuple[str, ...] | None = None
    for row in CsvRows(stream, delimiter=delimiter, max_row_bytes=max_row_bytes):
        if header is None:
            header = checked_header(row, name, delimiter)
        else:
            yield csv_record(row, header, delimiter)


def checked_header(row: CsvRow, name: str, delimiter: str) -> tuple[str, ...]:
    """Return the column names. Raise DataError if the first row cannot be a header, or uses another separator."""
    if row.cells[0].encode("utf-8", "surrogateescape").startswith(UTF16_MARKS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
    if row.reason:
        raise DataError(f"{name}: the header cannot be read: {row.reason}")
    names = tuple(cell.strip() or f"column {number}" for number, cell in enumerate(row.cells, start=1))
    twice = min((cell for cell, count in Counter(names).items() if count > 1), default=None)
    if twice is not None:
        raise DataError(f"{name}: the header names {shortened(twice)!r} twice; rename one")
    if not_text := next((cell for cell in names if not is_utf8(cell)), None):
        raise DataError(f"{name}: the header is not UTF-8 ({shortened(not_text)!r}); {SAVE_AS_UTF8}")
    if separator := other_separator(names):
        wanted = "comma" if delimiter == "," else "tab"
        known = ", or name it .tsv or write type: tsv for it" if separator == "a tab" else ""
        raise DataError(
            f"{name} has a single column, {shortened(names[0])!r}; its separator looks like {separator}: save it with "
            f"a {wanted} between cells{known}; rename the column if it really is the only one"
        )
    return names


def other_separator(columns: Sequence[str]) -> str | None:
    """Return the name of the separator of cells that were all read as one column; None if there is no likely one."""
    if len(columns) != 1:
        return None
    return next((word for mark, word in SEPARATORS.items() if mark in columns[0]), None)


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
        return bad(row.number, f"not UTF-8; {SAVE_AS_UTF8}", delimiter.join(row.cells))


def read_cells_slice(
    delimiter: str, file_slice: FileSlice, shard: int, start: Position | None
) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows under a header, as the reader of whole files does.

    A position is the byte after the row, the number of lines and, unless the slice is the whole file, the number of
    rows so far. In compressed files, the bytes before a position are decompressed again.

    Args:
        delimiter: Separator of the cells.
        file_slice: The file slice.
        shard: Index of the shard.
        start: Position to start at.
    """
    offset, passed, index = (*start, 0)[:3] if isinstance(start, list) else (0, 0, 0)
    header = read_header(file_slice, delimiter)
    if header is None:
        return
    names, head = header
    if not offset:
        offset, passed = head
    part, parts, limit = file_slice.part, file_slice.parts, file_slice.max_row_bytes
    with opened(file_slice.path, file_slice.label) as stream:
        seek(stream, offset)
        rows = CsvRows(
            stream,
            delimiter=delimiter,
            max_row_bytes=limit,
            offset=offset,
            number=passed + 1,
            block_bytes=file_slice.file_sizes.block_bytes,
        )
        for row in rows:
            index += 1
            if parts > 1 and (index - 1) % parts != part:
                continue
            after = [row.end, row.next_number - 1]
            yield cells_row(row, names, shard=shard, delimiter=delimiter), after if parts == 1 else [*after, index]


def read_header(file_slice: FileSlice, delimiter: str) -> tuple[Sequence[str], tuple[int, int]] | None:
    """Return the column names, and the bytes and lines before the first row; None for an empty file."""
    with opened(file_slice.path, file_slice.label) as stream:
        limit, block_bytes = file_slice.max_row_bytes, file_slice.file_sizes.block_bytes
        for row in CsvRows(stream, delimiter=delimiter, max_row_bytes=limit, block_bytes=block_bytes):
            return checked_header(row, file_slice.label, delimiter), (row.end, row.next_number - 1)
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


CSV = FileFormat(
    "csv", (".csv",), open=partial(open_text, read_csv), read_slice=partial(read_cells_slice, ","), stdin=True
)
TSV = FileFormat(
    "tsv", (".tsv",), open=partial(open_text, read_tsv), read_slice=partial(read_cells_slice, "\t"), stdin=True
)
