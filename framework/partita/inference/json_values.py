"""The JSON value in an answer: alone, in a fenced block, or with text around it.

The first complete value that fits counts. A value that is cut off is not replaced by a smaller one inside it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from partita.inference.reading import ReadError, clipped
from partita_schema.json_values import is_too_deep, json_validator, schema_mistake

MAX_REASON = 200
"""Characters of a reason that are kept."""

# Possessive, so that an opening without an end takes linear time.
FENCE = re.compile(r"```[ \t]*+[\w-]*+[ \t]*+\r?\n?(.*?)```", re.DOTALL)
START = re.compile(r"[{\[]")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_READER = json.JSONDecoder(parse_constant=_refuse_constant)


def find_json(text: str, *, check: Callable[[Any], Any]) -> Any:
    """The first complete JSON value in `text` for which `check` does not raise ReadError: what `check` returns.

    Raises ReadError: the reason of `check` for the first value, else why there is no value.
    """
    first: ReadError | None = None
    try:
        for value in _values(text):
            try:
                return check(_storable(value))
            except ReadError as reason:
                first = first or reason
    except ReadError as reason:
        first = first or reason
    raise first or ReadError(f"no JSON value stands in {clipped(text)}")


def _values(text: str) -> Iterator[Any]:
    """Complete values, the likeliest first. Raises ReadError at the first place where no more can be read."""
    for part in (text, *FENCE.findall(text)):
        try:
            yield _READER.decode(part.strip())
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply") from None
        except ValueError:
            continue
    yield from _embedded(text)


def _embedded(text: str) -> Iterator[Any]:
    place = 0
    while (start := START.search(text, place)) is not None:
        try:
            value, place = _READER.raw_decode(text, start.start())
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply") from None
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                raise ReadError(f"the JSON value is cut off: {clipped(text[start.start() :])}") from None
            # Beyond the mistake: what lies before it is a piece of a broken value, not a value.
            place = max(start.end(), error.pos)
        except ValueError:
            place = start.end()
        else:
            yield value


def _storable(value: Any) -> Any:
    """The value with lone surrogates replaced, which no UTF-8 file can hold. Raises ReadError where it is too deep."""
    if is_too_deep([value]):  # one level more, as in a row of the output
        raise ReadError("the JSON value is nested too deeply")
    written = json.dumps(value, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.loads(written.encode("utf-8", errors="replace"))
    return value


def compact(value: Any) -> str:
    """The value as JSON text without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class JsonReader:
    """Finds a JSON value in a text and holds it to its schema."""

    def __init__(self, schema: dict[str, Any] | None) -> None:
        self._validator = json_validator(schema) if schema is not None else None

    def read(self, text: str) -> Any:
        """The value. Raises ReadError."""
        return find_json(text, check=self.check)

    def check(self, value: Any) -> Any:
        """The same value. Raises ReadError where it does not satisfy the schema; the text names the path in it."""
        if self._validator is None:
            return value
        try:
            mistake = schema_mistake(self._validator, value)
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply for its schema") from None
        if mistake is not None:
            raise ReadError(mistake[:MAX_REASON])
        return value
