"""Values of single cells: what counts as empty, and conversion to text, numbers and JSON values."""

import datetime
import decimal
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from partita_schema.common.text import first_repeated
from partita_schema.errors import shortened

NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class CellError(ValueError):
    """A value that does not fit its column; the text says why. `RowSchema` reports it with the column."""


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these keys and values. Raise RepeatedKeyError if a value would be lost."""
    value = dict(pairs)
    if len(value) < len(pairs) and (twice := first_repeated(name for name, _ in pairs)) is not None:
        raise RepeatedKeyError(f"the key {shortened(twice)!r} occurs twice in an object; remove or rename one")
    return value


def is_missing(value: object) -> bool:
    """Return whether a cell is empty: None, NaN, pandas' NA and NaT, or a blank string."""
    if isinstance(value, str):
        return not value or value.isspace()
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and bool(value != value)  # math.isnan fails for numbers of 400 digits


def plain_text(value: object) -> str:
    """Return a string, date, number or boolean as text: 8.0 as 8, True as true. Raises CellError for other types."""
    if isinstance(value, str):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # of Python or NumPy
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(str(value))  # via str, so that a 32-bit 0.1 is 0.1 and not 0.10000000149011612
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise CellError(f"{shown(value)} is not text")


def text_reader(*, lowercase: bool = False) -> Callable[[Any], str]:
    """Return the function that converts cells to text."""
    return (lambda value: plain_text(value).lower()) if lowercase else plain_text


def shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of 5,000 digits, or a list that contains itself
        text = f"a {type(value).__name__}"
    return shortened(text)


def parse_cell(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=without_repeats)
    except RecursionError:
        from partita_schema.json_values import TOO_DEEP  # imports jsonschema, which takes time

        raise CellError(f"the value is {TOO_DEEP}") from None
    except RepeatedKeyError as error:
        raise CellError(str(error)) from None
    except ValueError as error:
        raise CellError(f"{shown(text)} is not JSON ({error})") from None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def plain_json(value: Any) -> Any:
    """Return a value as plain JSON types. NumPy arrays and scalars are converted."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CellError(f"{value} is not a JSON number")
        return value
    if hasattr(value, "tolist"):
        return plain_json(value.tolist())
    raise CellError(f"{shown(value)} is not a JSON value")


def compact_json(value: Any) -> str:
    """Return a value as JSON text without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
