"""Rows of Arrow tables.

Arrow may hold dates of 292 billion years, unvalidated text, and time zones that are not installed. Python has no values
for them and raises an exception for a whole batch. Here only such a row is bad, and the others are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.arrow_values import convert_rows, converters
from partita.data.formats.base import MAX_RAW, StreamRow
from partita.data.rows import ArrowStore, BadRow, DatasetStore, RowKeys, Rows, Store, hash_rows
from partita_schema.common.text import first_repeated
from partita_schema.errors import DataError, shortened

if TYPE_CHECKING:
    import datasets
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


def rows_of_batch(batch: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any] | UnreadableRow]:
    """Return the rows of a batch, each as a mapping if all of its values can be read."""
    try:
        batch.validate(full=True)  # invalid offsets would end the process with a segmentation fault
        rows = batch.to_pylist()
    except failures():
        return [row_of(batch.slice(index, 1)) for index in range(batch.num_rows)]
    convert_rows(rows, converters(batch.schema))
    return list(rows)


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
    if reason:
        return UnreadableRow(reason[:MAX_RAW], repr(values)[:MAX_RAW])
    convert_rows([values], converters(batch.schema))
    return values


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


def table_row(values: dict[str, Any] | UnreadableRow, shard: int, number: int) -> StreamRow:
    """Return the values of a row as a row of a shard."""
    if isinstance(values, UnreadableRow):
        return StreamRow(shard, number, b"", values.reason, values.raw)
    return StreamRow(shard, number, values)


def check_names(names: Sequence[str], label: str) -> None:
    """Raise DataError if two columns have the same name: rows would keep the values of one of them."""
    twice = first_repeated(names)
    if twice is not None:
        raise DataError(f"{label} has two columns named {shortened(twice)!r}; rename one")
