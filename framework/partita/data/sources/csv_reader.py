"""Read rows of CSV and TSV files; every cell remains text."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from partita.data.sources.csv_rows import CsvRow, CsvRows
from partita.data.sources.records import MAX_ROW_BYTES, UTF16_MARKS, SourceRecord, bad, dump
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
        raise DataError(f"{name}: the header is not UTF-8 ({shortened(not_text)!r}); save the file as UTF-8")
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
        return bad(row.number, "not UTF-8", delimiter.join(row.cells))
