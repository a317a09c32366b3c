"""Find the JSON value in an answer: alone, in a fenced block, or surrounded by text.

The first complete value that passes the check is used. A truncated value is not replaced by a smaller one inside it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from partita.outputs.base import ReadError, clip
from partita_schema.json_values import is_too_deep

# Possessive quantifiers, so that an opening without an end takes linear time.
FENCE = re.compile(r"```[ \t]*+[\w-]*+[ \t]*+\r?\n?(.*?)```", re.DOTALL)
START = re.compile(r"[{\[]")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_READER = json.JSONDecoder(parse_constant=_refuse_constant)


def find_json(text: str, *, check: Callable[[Any], Any]) -> Any:
    """Return the result of `check` for the first complete JSON value in `text` that it accepts.

    Raises ReadError with the reason for the first value, or why there is no value.
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
    raise first or ReadError(f"no JSON value in {clip(text)}")


def _values(text: str) -> Iterator[Any]:
    """Yield complete values, the most likely first. Raise ReadError where no more can be read."""
    for part in (text, *FENCE.findall(text)):
        try:
            yield _READER.decode(part.strip())
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply") from None
        except ValueError:
            continue
    yield from _find_values(text)


def _find_values(text: str) -> Iterator[Any]:
    offset = 0
    while (start := START.search(text, offset)) is not None:
        try:
            value, offset = _READER.raw_decode(text, start.start())
        except RecursionError:
            raise ReadError("the JSON value is nested too deeply") from None
        except json.JSONDecodeError as error:
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                raise ReadError(f"the JSON value is cut off: {clip(text[start.start() :])}") from None
            # Continue after the error: what lies before it is a fragment of a broken value.
            offset = max(start.end(), error.pos)
        except ValueError:
            offset = start.end()
        else:
            yield value


def _storable(value: Any) -> Any:
    """Return the value with lone surrogates replaced, which UTF-8 cannot encode. Raise ReadError if it is too deep."""
    if is_too_deep([value]):  # one more level, as in a row of the output
        raise ReadError("the JSON value is nested too deeply")
    written = json.dumps(value, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return json.loads(written.encode("utf-8", errors="replace"))
    return value
