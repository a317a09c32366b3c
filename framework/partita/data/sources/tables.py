"""Open Parquet and Arrow files and Hub datasets by index: typed columns, memory-mapped by `datasets`.

Arrow may hold dates of 292 billion years, unvalidated text, and time zones that are not installed. Python has no values
for them and raises an exception for a whole batch. Here only such a row is bad, and the others are read.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.rows import BadRow, DatasetStore, RowKeys, Rows, digest
from partita.data.sources.in_memory import hash_rows
from partita.data.sources.records import MAX_RAW
from partita_schema.errors import DataError
from partita_schema.sections.sources import HubSource

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


def rows_of(batch: "pyarrow.RecordBatch | pyarrow.Table") -> list[dict[str, Any] | UnreadableRow]:
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
            for index, row in enumerate(rows_of(batch)):
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


def open_tables(kind: str, paths: Sequence[str], names: Sequence[str]) -> Rows:
    """Return the rows of Parquet or Arrow files."""
    import datasets

    parts = [load(kind, data_files=[path], split="train", label=name) for path, name in zip(paths, names, strict=True)]
    try:
        table = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError) as error:
        raise DataError(f"the files {', '.join(names[:3])} have different columns: {error}") from None
    if not len(table):
        raise DataError(f"{', '.join(names[:3])} has no rows")
    sizes = [len(part) for part in parts]
    files = np.repeat(np.arange(len(parts)), sizes)
    numbers = np.concatenate([np.arange(1, size + 1) for size in sizes])
    keys = RowKeys(names, files, numbers)
    hashes = [hash_file(path) if "://" not in path else "" for path in paths]
    return readable_rows(table, keys, content=digest(*names, *hashes) if all(hashes) else None)


def readable_rows(table: "datasets.Dataset", keys: RowKeys, *, content: str | None) -> Rows:
    """Return the rows that Python can represent; the others are bad rows. `content` is a hash, if one is known."""
    batches = table.with_format("arrow").iter(batch_size=BATCH)
    unreadable = dict(unreadable_rows(batches))
    bad = [
        BadRow(str(keys[index]), *keys.location(index), row.reason, row.raw, num_before=index - number)
        for number, (index, row) in enumerate(unreadable.items())
    ]
    if len(bad) == len(table):
        raise DataError(f"{keys.names[0]} has no good row: {bad[0].key}: {bad[0].reason}")
    store = DatasetStore(table)
    if not bad:
        fingerprint = hash_rows(store) if content is None else content
        return Rows(store, columns=table.column_names, keys=keys, fingerprint=fingerprint)
    good = np.setdiff1d(np.arange(len(table)), list(unreadable))
    fingerprint = hash_rows(store, good) if content is None else content
    return Rows(store, columns=table.column_names, keys=keys.take(good), fingerprint=fingerprint, bad=bad, index=good)


def hash_file(path: str) -> str:
    with Path(path).open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def open_hub(source: HubSource, *, folder: Path) -> Rows:
    """Return the rows of a dataset on the Hub, or of a folder in its layout."""
    local = folder / Path(source.name).expanduser()
    name = str(local) if local.is_dir() else source.name
    label = Path(source.name).name
    table = load(
        name,
        name=source.subset,
        split=source.split,
        revision=source.revision,
        label=source.name,
        remote=name != str(local),
    )
    if not len(table):
        raise DataError(f"{source.name} has no rows in split {source.split}")
    return readable_rows(table, RowKeys.counted(f"{label}/{source.split}", len(table)), content=None)


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
