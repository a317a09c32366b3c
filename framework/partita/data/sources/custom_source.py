"""A user's class as a source, created with the options of the configuration."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from partita.data.parts import load_part, source_digest
from partita.data.rows import Rows, digest
from partita.data.sources.in_memory import open_in_memory
from partita_schema.errors import DataError
from partita_schema.sources import CustomSource


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
    rows = instance.rows() if callable(getattr(instance, "rows", None)) else instance
    held = isinstance(rows, Mapping | str | bytes) or hasattr(rows, "__getitem__") or not isinstance(rows, Iterable)
    return open_in_memory(rows if held else list(rows), name=name)


def make_source(source: CustomSource, *, folder: Path, key: str = "data.source.target") -> Any:
    """Return an instance of a source's class. Raise ConfigError or DataError if it cannot be created."""
    source_class = load_part(source.target, key=key, folder=folder)
    try:
        return source_class(**source.options)
    except TypeError as error:
        raise DataError(f"{source.target} cannot be made with options {dict(source.options)}: {error}") from error


def content_of(made: Any, source: CustomSource) -> str:
    """Return a hash of what is known about the rows without reading them."""
    options = json.dumps(dict(source.options), sort_keys=True, default=repr)
    return digest(source.target, options, source_digest(type(made)), str(getattr(made, "fingerprint", "")))


def check_iterable(made: Any, target: str) -> None:
    """Raise DataError if a class has neither `rows()` nor `__iter__`."""
    if not callable(getattr(made, "rows", None)) and not isinstance(made, Iterable):
        raise DataError(f"{target} gives no rows; write a method rows() that returns an iterable of dicts")


def iterable_of(made: Any, target: str) -> Iterable[Any]:
    """Return the rows of a class with `rows()` or `__iter__`. Raise DataError if they are not an iterable of rows."""
    check_iterable(made, target)
    rows = made.rows() if callable(getattr(made, "rows", None)) else made
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise DataError(f"{target}.rows gave a {type(rows).__name__}; return an iterable of dicts")
    return rows
