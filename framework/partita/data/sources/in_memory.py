"""Open in-memory data as rows: pandas data frames, `datasets` objects, lists of mappings, mappings of lists; and
sources that are a class written by the user.
"""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.formats.arrow_rows import check_names
from partita.data.rows import (
    ArrowStore,
    ColumnStore,
    DatasetStore,
    FrameStore,
    ListStore,
    RowKeys,
    Rows,
    Store,
    digest,
    hash_rows,
)
from partita.data.short_floats import SHORT, same_text
from partita.data.sources.python_datasets import MapStore, is_map_style, is_stream, rows_of_stream, splits_of
from partita.data.user_objects import errors_of, source_digest
from partita_schema.errors import DataError
from partita_schema.sections.sources import CustomSource
from partita_trainers.user_modules import check_arguments, load_class


def open_in_memory(dataset: Any, *, name: str) -> Rows:
    """Return the rows of a data frame, a pyarrow table, a dataset of `datasets` or torch, dicts or columns.

    All rows are read once for their hash, unless a map-style dataset has an attribute `fingerprint`, a string. Streams
    are read into memory.
    """
    store, columns = store_of(dataset)
    if not len(store):
        raise DataError(f"{name} has no rows")
    named = getattr(dataset, "fingerprint", None) if isinstance(store, MapStore) else None
    if isinstance(store, MapStore) and isinstance(named, str):
        columns, fingerprint = list(store.row(0)), digest(type(dataset).__name__, named)
    else:
        fingerprint = hash_rows(store)
        columns = list(store.columns) if isinstance(store, MapStore) else columns
    return Rows(store, columns=columns, keys=RowKeys.counted(name, len(store)), fingerprint=fingerprint)


def is_frame(dataset: Any) -> bool:
    """Return whether an object is a pandas frame, without importing pandas."""
    return type(dataset).__module__.split(".")[0] == "pandas" and type(dataset).__name__ == "DataFrame"


def store_of(dataset: Any) -> tuple[Store, list[str]]:
    kind = type(dataset).__module__.split(".")[0], type(dataset).__name__
    if is_frame(dataset):
        names = [str(column) for column in dataset.columns]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"the data frame has two columns {twice!r}; rename or drop one of them")
        return FrameStore(dataset), names
    if kind == ("pyarrow", "Table"):
        check_names(dataset.column_names, "the table")
        return ArrowStore(dataset), list(dataset.column_names)
    if kind == ("datasets", "Dataset"):
        return DatasetStore(dataset), list(dataset.column_names)
    if splits_of(dataset) is not None:
        raise DataError(f"a {kind[1]} holds several datasets; pass one of them, such as dataset['test']")
    if isinstance(dataset, Mapping):
        return columns_of(dataset)
    if isinstance(dataset, Sequence) and not isinstance(dataset, str | bytes):
        return list_of(dataset)
    if is_stream(dataset):
        return list_of(list(rows_of_stream(dataset)))
    if is_map_style(dataset):
        return MapStore(dataset), []
    raise DataError(
        f"a {type(dataset).__name__} is not a dataset; pass a path, a glob, a Hub name, a pandas frame, a pyarrow "
        "table, a dataset of datasets or torch, a generator function, a list of dicts or a dict of lists"
    )


def columns_of(mapping: Mapping[Any, Any]) -> tuple[Store, list[str]]:
    columns: dict[str, list[Any]] = {}
    for name, values in mapping.items():
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
            raise DataError(f"column {name} is not a list but a {type(values).__name__}; write a dict of lists")
        columns[str(name)] = list_of_values(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        raise DataError(f"the columns have different numbers of rows: {sizes}")
    return ColumnStore(columns), list(columns)


def list_of_values(values: Any) -> list[Any]:
    """Return the values of a column as values of Python, those of an array with the same text."""
    kind = str(getattr(values, "dtype", ""))
    if kind in SHORT:
        return [same_text(value, kind=SHORT[kind]) for value in values.tolist()]
    if isinstance(values, np.ndarray) and kind.startswith("datetime64"):  # in nanoseconds, `tolist` gives integers
        values = values.astype("datetime64[us]")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def list_of(rows: Sequence[Any]) -> tuple[Store, list[str]]:
    columns: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number:,} is a {type(row).__name__}, not a dict of column to value")
        columns.update(dict.fromkeys(map(str, row)))
    return ListStore(rows), list(columns)


def open_custom(source: CustomSource, *, folder: Path, name: str) -> Rows:
    """Return all rows of a class with `rows()` or `__iter__`.

    Raises:
        ConfigError: If there is no such class.
        DataError: If it does not return rows.
    """
    instance = make_source(source, folder=folder)
    if callable(getattr(instance, "read", None)) and not callable(getattr(instance, "rows", None)):
        raise DataError(f"{source.target} is read as a stream; write streaming: true, or give it a method rows()")
    check_iterable(instance, source.target)
    with errors_of(source.target):
        rows = instance.rows() if callable(getattr(instance, "rows", None)) else instance
        return open_in_memory(list(rows) if isinstance(rows, Iterator) else rows, name=name)


def make_source(source: CustomSource, *, folder: Path) -> Any:
    """Return an instance of a source's class. Raise ConfigError or DataError if it cannot be created."""
    source_class = load_class(source.target, key="data.source.target", folder=folder)
    try:
        check_arguments(source_class, **source.options)
    except TypeError as error:
        message = f"{source.target} cannot be created with options {dict(source.options)}: {error}"
        raise DataError(f"{message}; write the options that its __init__ takes") from None
    with errors_of(source.target):
        return source_class(**source.options)


def content_of(custom: Any, source: CustomSource) -> str:
    """Return a hash of what is known about the rows without reading them."""
    options = json.dumps(dict(source.options), sort_keys=True, default=repr)
    return digest(source.target, options, source_digest(type(custom)), str(getattr(custom, "fingerprint", "")))


def check_iterable(custom: Any, target: str) -> None:
    """Raise DataError if a class has neither `rows()` nor `__iter__`, and is not read by index."""
    has_rows = callable(getattr(custom, "rows", None)) or isinstance(custom, Iterable) or is_map_style(custom)
    if not has_rows:
        raise DataError(f"{target} gives no rows; write a method rows() that returns an iterable of dicts")


def iterable_of(custom: Any, target: str) -> Iterable[Any]:
    """Return the rows of a class with `rows()` or `__iter__`. Raise DataError if they are not an iterable of rows."""
    check_iterable(custom, target)
    rows = custom.rows() if callable(getattr(custom, "rows", None)) else custom
    if inspect.isgeneratorfunction(rows):
        rows = rows()
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise DataError(f"{target}.rows gave a {type(rows).__name__}; return an iterable of dicts")
    if is_frame(rows):
        raise DataError(f"{target}.rows gave a pandas frame, which is not streamed; leave out streaming: true")
    return rows
