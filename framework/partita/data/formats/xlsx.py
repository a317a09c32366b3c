"""Read the rows of a sheet of an Excel workbook with openpyxl (`pip install 'partita[excel]'`).

The first row with a value is the header. Numbers and booleans keep their type, dates and times become ISO text. A
formula has the value that the program that saved the file computed.
"""

import datetime
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

from partita.data.formats.base import (
    FileFormat,
    FileOptions,
    FileSlice,
    Position,
    SourceRecord,
    StreamRow,
    bad,
    column_names,
    dump,
    read_from_start,
    too_long,
)
from partita.data.formats.text_files import open_text
from partita.data.rows import Rows
from partita_schema.common.text import counted, nearest
from partita_schema.errors import DataError


def read_xlsx(stream: BinaryIO, name: str, max_row_bytes: int, *, sheet: str | None = None) -> Iterator[SourceRecord]:
    """Yield the rows of a sheet under its header; empty rows are skipped. The number of a row is that in the sheet.

    Args:
        stream: The file.
        name: Name of the file, for errors.
        max_row_bytes: Maximum size of a row as JSON.
        sheet: Name of the sheet. Default: the first.

    Raises:
        DataError: openpyxl is missing, the file is not a workbook, or it has no such sheet or no header.
    """
    with opened_sheet(stream, name, sheet=sheet) as rows:
        header: tuple[str, ...] = ()
        for number, cells in enumerate(rows, start=1):
            values = [value_of(cell) for cell in cells]
            while values and values[-1] is None:
                values.pop()
            if not values:
                continue
            if header:
                yield record_of(number, cells, values, header, max_row_bytes=max_row_bytes)
            else:
                header = column_names(["" if value is None else str(value) for value in values], name)


@contextmanager
def opened_sheet(stream: BinaryIO, name: str, *, sheet: str | None) -> Iterator[Iterator[Sequence[Any]]]:
    """Yield the cells of each row of a sheet."""
    try:
        import openpyxl  # type: ignore[import-untyped] # it ships no types
    except ImportError:
        raise DataError(f"{name}: Excel files need openpyxl: pip install 'partita[excel]', or save it as csv") from None
    try:
        workbook = openpyxl.load_workbook(stream, read_only=True, data_only=True)
        try:
            worksheet = sheet_of(workbook, name, sheet=sheet)
            worksheet.reset_dimensions()  # what a file says of its size may be wrong, and each row is filled up to it
            yield worksheet.iter_rows()
        finally:
            workbook.close()
    except (DataError, OSError):
        raise
    except zipfile.BadZipFile as error:
        reason = "it is no xlsx file, or it has a password"
        raise DataError(f"{name} cannot be read: {reason} ({' '.join(str(error).split())})") from error
    except Exception as error:  # openpyxl raises what the parts of a damaged file cause: KeyError, ParseError ...
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from error


def sheet_of(workbook: Any, name: str, *, sheet: str | None) -> Any:
    """Return the sheet with a name, or the first. Raise DataError if there is none."""
    sheets = {worksheet.title: worksheet for worksheet in workbook.worksheets}
    if not sheets:
        raise DataError(f"{name} has no sheet with cells")
    if sheet is None:
        return next(iter(sheets.values()))
    if sheet not in sheets:
        near = nearest(sheet, list(sheets))
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"{name} has no sheet {sheet!r}; its sheets are {', '.join(sheets)}{hint}")
    return sheets[sheet]


def record_of(
    number: int, cells: Sequence[Any], values: list[Any], header: tuple[str, ...], *, max_row_bytes: int
) -> SourceRecord:
    """Return a row, or the reason why it is bad.

    Args:
        number: Number of the row in the sheet.
        cells: Its cells.
        values: Their values up to the last one.
        header: The column names.
        max_row_bytes: Maximum size of the row as JSON.
    """
    if len(values) > len(header):
        return bad(number, f"{counted(len(values), 'cell')}, the header has {len(header)}", repr(values))
    for column, cell in zip(header, cells, strict=False):
        if getattr(cell, "data_type", None) == "e":
            return bad(number, f"column {column}: the cell has the error {cell.value}", repr(values))
    values += [None] * (len(header) - len(values))
    row = dump(dict(zip(header, values, strict=True)))
    if len(row) > max_row_bytes:
        return bad(number, too_long(max_row_bytes), "")
    return SourceRecord(number, row, header)


def value_of(cell: Any) -> Any:
    """Return the value of a cell as JSON: dates and times as ISO text."""
    value = cell.value
    if isinstance(value, datetime.datetime):
        midnight = value.time() == datetime.time()
        return value.date().isoformat() if midnight else value.isoformat()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return None if isinstance(value, str) and not value.strip() else value


def open_xlsx(paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions) -> Rows:
    """Return the rows of workbooks by index.

    Args:
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Maximum size of a row as JSON.
        options: The sheet.

    Raises:
        DataError: If a file cannot be read, or no row is good.
    """
    read = partial(read_xlsx, sheet=options.sheet)
    return open_text(read, paths, names, max_row_bytes=max_row_bytes, options=options)


def read_xlsx_slice(file_slice: FileSlice, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
    """Yield the rows of a workbook, which is read from its beginning; a position is the number of rows so far."""
    return read_from_start(partial(read_xlsx, sheet=file_slice.options.sheet), file_slice, shard, start)


XLSX = FileFormat("xlsx", (".xlsx", ".xlsm"), open=open_xlsx, read_slice=read_xlsx_slice)
