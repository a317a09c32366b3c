"""Conversion of cells: lists, texts and JSON."""

import json
from collections.abc import Mapping
from typing import Any

from partita_schema.cells import RepeatedKeyError, without_repeats
from partita_schema.dialogues.common_form import FormatError
from partita_schema.errors import shortened


def holds(value: object) -> bool:
    """Return whether a value is set: not None, NaN, or an empty string, list or mapping."""
    if value is None or (isinstance(value, float) and value != value):
        return False
    return not hasattr(value, "__len__") or len(value) > 0


def plain_list(value: object) -> list[Any] | None:
    """Return a list, also from an array or a JSON string, or None for anything else.

    Raises FormatError for a JSON string with a key twice.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value, object_pairs_hook=without_repeats)
        except RepeatedKeyError as error:
            raise FormatError(str(error)) from None
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "tolist") and not isinstance(value, str):
        converted = value.tolist()
        return converted if isinstance(converted, list) else None
    return None


def parsed_json(value: Any, where: str) -> Any:
    """Return a JSON value; text is parsed. Raise FormatError if it is not JSON, or nested too deeply."""
    from partita_schema.json_values import TOO_DEEP, is_too_deep

    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=without_repeats)
        except RepeatedKeyError as error:
            raise FormatError(f"{where}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: {shortened(value.strip())!r} is not JSON ({error})") from None
    if is_too_deep(value):
        raise FormatError(f"{where} is {TOO_DEEP}")
    return value


def is_text(value: object) -> bool:
    """Return whether a value is a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def text_of(value: object, where: str, *, key: str = "content") -> str:
    """Return a text that is not blank; a list of text parts is concatenated. Raises FormatError."""
    parts = None if isinstance(value, str) else plain_list(value)
    if parts is not None:
        value = "".join(text_of_part(part, f"{where}: part {n} of {key}") for n, part in enumerate(parts, start=1))
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise FormatError(f"{where}: {key} is {'missing' if value is None else 'not text'}")
    if not value.strip():
        raise FormatError(f"{where}: {key} is empty")
    return value


def text_of_part(part: object, where: str) -> str:
    """Return the text of a part of a message. Raise FormatError for images, sound and anything else."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type", "no text") if isinstance(part, Mapping) else type(part).__name__
    raise FormatError(f"{where} is {kind}, and only text is read; leave it out")
