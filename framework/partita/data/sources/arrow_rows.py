"""Convert Arrow batches to Python rows, and find rows without Python values.

Arrow may hold dates of 292 billion years, unvalidated text, and time zones that are not installed. Python has no values
for them and raises an exception for a whole batch. Here only such a row is bad, and the others are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.data.sources.records import MAX_RAW

if TYPE_CHECKING:
    import pyarrow

BATCH = 4096
"""Rows that are checked at a time."""


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


def rows_of(batch: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any] | UnreadableRow]:
    """Return the rows of a batch, each as a mapping if all of its values can be read."""
    try:
        batch.validate(full=True)  # invalid offsets would end the process with a segmentation fault
        rows: list[dict[str, Any] | UnreadableRow] = list(batch.to_pylist())
    except failures():
        return [row_of(batch.slice(place, 1)) for place in range(batch.num_rows)]
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
        suspects = batch.select([place for place, field in enumerate(batch.schema) if is_suspect(field.type)])
        if not all(map(is_readable, suspects.columns)):
            for place, row in enumerate(rows_of(batch)):
                if isinstance(row, UnreadableRow):
                    yield first + place, row
        first += batch.num_rows


def is_suspect(kind: "pyarrow.DataType") -> bool:
    """Return whether a type has values that Python cannot represent: dates and times, and text."""
    import pyarrow

    types = pyarrow.types
    inner = (
        [kind.value_type] if types.is_dictionary(kind) else [kind.field(place).type for place in range(kind.num_fields)]
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
