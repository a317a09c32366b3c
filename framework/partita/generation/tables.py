"""Prediction files: JSON lines, CSV or Parquet by extension, written row by row and atomically."""

import csv
import datetime
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from partita.generation.record import json_line
from partita.outputs.base import ColumnType
from partita.runs.files import new_file, open_temporary, output_file, why_not_written
from partita_schema.cells import NUMBER
from partita_schema.errors import DataError, WriteError

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
CHUNK_ROWS = 1000
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a formula, including full-width ones (OWASP, CSV Injection)."""


def check_ending(path: Path) -> None:
    """Raise DataError if no table can be written with this extension."""
    if path.suffix.lower() not in WRITERS:
        ending = f"the ending {path.suffix!r}" if path.suffix else "no ending"
        raise DataError(f"{path} has {ending}; predictions are written as .jsonl, .csv or .parquet")


def check_output(path: Path, *, safe_csv: bool = False) -> None:
    """Check before a job that its output can be written; nothing is left behind, and no folder is created.

    Raises DataError for another extension, and if this user cannot write there.
    """
    check_ending(path)
    if safe_csv and path.suffix.lower() != ".csv":
        raise DataError(f"safe_csv is for .csv files, and {path} is another one; leave it out")
    try:
        file = output_file(path)
        folder = next(folder for folder in file.absolute().parents if folder.exists())
        tried, descriptor = open_temporary(folder / file.name)
        os.close(descriptor)
        tried.unlink()
    except OSError as error:
        raise DataError(why_not_written(error, path)) from error


def write_table(path: Path, rows: Iterable[Row], *, columns: Mapping[str, ColumnType], safe_csv: bool = False) -> None:
    """Write rows to `path`, in the format of its extension; the file is complete, or unchanged on an error.

    Args:
        path: The file; a symbolic link is followed.
        rows: The rows, written one at a time.
        columns: Type of each column, by name.
        safe_csv: Escape text of a .csv that a spreadsheet would run as a formula.

    Raises:
        DataError: The extension is not supported.
        WriteError: The file cannot be written.
    """
    check_ending(path)
    try:
        target = output_file(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_file(target) as file:
            if safe_csv:
                _write_csv(file, rows, columns, safe=True)
            else:
                WRITERS[path.suffix.lower()](file, rows, columns)
    except OSError as error:
        raise WriteError(
            f"{why_not_written(error, path)}. The answers are saved; rerun the same command afterwards"
        ) from error


def _write_jsonl(file: IO[bytes], rows: Iterable[Row], columns: Mapping[str, ColumnType]) -> None:
    for row in rows:
        file.write(json_line({name: plain(row[name]) for name in columns}))


def _write_csv(
    file: IO[bytes],
    rows: Iterable[Row],
    columns: Mapping[str, ColumnType],
    *,
    safe: bool = False,
) -> None:
    cell = _safe_cell if safe else _cell
    text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
    # A spreadsheet in another locale may split an unquoted cell at a semicolon.
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC if safe else csv.QUOTE_MINIMAL)
    writer.writerow([cell(name) for name in columns])
    for row in rows:
        writer.writerow([cell(row[name]) for name in columns])
    text.flush()
    text.detach()


def _write_parquet(file: IO[bytes], rows: Iterable[Row], columns: Mapping[str, ColumnType]) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, arrow_schema(columns)) as writer:
        for table in arrow_tables(rows, columns=columns):
            writer.write_table(table)


Writer = Callable[[IO[bytes], Iterable[Row], Mapping[str, ColumnType]], None]
WRITERS: dict[str, Writer] = {".jsonl": _write_jsonl, ".csv": _write_csv, ".parquet": _write_parquet}


def arrow_schema(columns: Mapping[str, ColumnType]) -> "pa.Schema":
    """Return the Arrow schema of a table."""
    import pyarrow as pa

    types = {"boolean": pa.bool_(), "integer": pa.int64(), "number": pa.float64(), "vector": pa.list_(pa.float32())}
    return pa.schema([(name, types.get(kind, pa.string())) for name, kind in columns.items()])


def arrow_tables(rows: Iterable[Row], *, columns: Mapping[str, ColumnType]) -> Iterator["pa.Table"]:
    """Yield the rows as Arrow tables of a thousand rows; at least one, so that there is a schema."""
    import pyarrow as pa

    schema = arrow_schema(columns)
    empty = True
    for chunk in chunks(rows):
        empty = False
        cells = {name: [_convert(row[name], kind) for row in chunk] for name, kind in columns.items()}
        yield pa.table(cells, schema=schema)
    if empty:
        yield schema.empty_table()


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists of a thousand."""
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def column_types(rows: Iterable[Row], *, columns: Sequence[str]) -> dict[str, ColumnType]:
    """Return the narrowest type of each column that fits all its values; text for a column without values."""
    kinds: dict[str, set[ColumnType]] = {name: set() for name in columns}
    for row in rows:
        for name in columns:
            value = plain(row.get(name))
            if value is not None:
                kinds[name].add(_kind(value))
    return {name: _widest(kinds_of_column) for name, kinds_of_column in kinds.items()}


def _kind(value: Any) -> ColumnType:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "number"
    return "text" if isinstance(value, str) else "json"


def _widest(kinds: set[ColumnType]) -> ColumnType:
    if not kinds:
        return "text"
    if kinds == {"integer", "number"}:
        return "number"
    return next(iter(kinds)) if len(kinds) == 1 else "json"


def plain(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinities are None, dates are ISO text, other objects are their text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        # pandas' missing date is also a date, and not equal to itself.
        return value.isoformat() if value == value else None
    # numpy scalars and arrays
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _cell(value: Any) -> Any:
    value = plain(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else value


def _safe_cell(value: Any) -> Any:
    """Return the cell, with an apostrophe before what a spreadsheet would read as a formula; keep numbers."""
    cell = _cell(value)
    formula = isinstance(cell, str) and cell.lstrip(" ").startswith(FORMULA_STARTS) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def _convert(value: Any, kind: ColumnType) -> Any:
    value = plain(value)
    if value is None:
        return None
    if kind == "vector":
        return value
    if kind == "json":
        return json.dumps(value, ensure_ascii=False).encode("utf-8", errors="replace").decode()
    if kind == "text":
        return str(value).encode("utf-8", errors="replace").decode()
    return float(value) if kind == "number" else value
