"""A user's class as a source: made with the options of the file."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from partita.data.parts import load_part, source_digest
from partita.data.reading.in_memory import open_in_memory
from partita.data.rows import Rows, digest
from partita_schema.errors import DataError
from partita_schema.sources import CustomSource


def open_custom(source: CustomSource, *, folder: Path, name: str) -> Rows:
    """All rows of a class with `rows()` or `__iter__`.

    Raises ConfigError where there is no such class, and DataError where it does not give rows.
    """
    made = make_source(source, folder=folder)
    if callable(getattr(made, "read", None)) and not callable(getattr(made, "rows", None)):
        raise DataError(f"{source.target} is read as a stream; write streaming: true, or give it a method rows()")
    check_iterable(made, source.target)
    found = made.rows() if callable(getattr(made, "rows", None)) else made
    held = isinstance(found, Mapping | str | bytes) or hasattr(found, "__getitem__") or not isinstance(found, Iterable)
    return open_in_memory(found if held else list(found), name=name)


def make_source(source: CustomSource, *, folder: Path, key: str = "data.source.target") -> Any:
    """The class of a source, made with its options. Raises ConfigError or DataError where that does not work."""
    found = load_part(source.target, key=key, folder=folder)
    try:
        return found(**source.options)
    except TypeError as error:
        raise DataError(f"{source.target} cannot be made with options {dict(source.options)}: {error}") from error


def content_of(made: Any, source: CustomSource) -> str:
    """A hash of what is known of the rows without reading them."""
    options = json.dumps(dict(source.options), sort_keys=True, default=repr)
    return digest(source.target, options, source_digest(type(made)), str(getattr(made, "fingerprint", "")))


def check_iterable(made: Any, target: str) -> None:
    """Raise DataError where a class has neither `rows()` nor `__iter__`."""
    if not callable(getattr(made, "rows", None)) and not isinstance(made, Iterable):
        raise DataError(f"{target} gives no rows; write a method rows() that returns an iterable of dicts")


def iterable_of(made: Any, target: str) -> Iterable[Any]:
    """The rows of a class with `rows()` or `__iter__`. Raises DataError where they are none."""
    check_iterable(made, target)
    found = made.rows() if callable(getattr(made, "rows", None)) else made
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise DataError(f"{target}.rows gave a {type(found).__name__}; return an iterable of dicts")
    return found
