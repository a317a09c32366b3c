"""JSON that carries its own checksum, so that damaged state is noticed when it is read back.

A document is an object whose key `checksum` holds a hash of all other keys, whatever their order and layout. A line of
a journal is an object whose last key holds a hash of the bytes before it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any
from zlib import crc32

KEY = "checksum"
LINE_END = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n?\Z')


class DamagedError(ValueError):
    """Saved state is not as it was written. The text follows the name of the file: `is not JSON (...)`."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for text that is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Documents


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with a checksum over everything else in it."""
    body = {key: value for key, value in document.items() if key != KEY}
    return {**body, KEY: document_sum(body)}


def unsealed(text: str | bytes, *, required: bool = False) -> dict[str, Any]:
    """Return the document in a JSON text, without its checksum.

    What a person wrote has no checksum and is taken as it is, unless one is `required`. Raises DamagedError where the
    text is no JSON object or not as it was written.
    """
    try:
        found = parse_json(text)
    except ValueError as error:  # of JSON, and of bytes that are not UTF-8
        raise DamagedError(f"is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedError("is not a JSON object")
    written = found.pop(KEY, None)
    if (written is not None or required) and written != document_sum(found):
        raise DamagedError("is not as it was written (its checksum differs)")
    return found


def document_sum(document: Mapping[str, Any]) -> str:
    """Return a hash of a document that does not depend on the order of its keys."""
    as_read = json.loads(json.dumps(document))  # keys that are numbers become text, tuples become lists
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()[:16]


# Lines


def sealed_line(line: bytes) -> bytes:
    """Return a line that holds a JSON object, not empty, with a checksum as its last key."""
    body = line.removesuffix(b"\n").removesuffix(b"}")
    return body + f', "{KEY}": "{crc32(body):08x}"}}\n'.encode()


def unsealed_line(line: bytes, *, required: bool = True) -> dict[str, Any]:
    """Return the object in a line, without its checksum. Raises DamagedError where it is not as it was written."""
    end = LINE_END.search(line[-40:])
    if end is None and required:
        raise DamagedError("has no checksum")
    if end is not None and int(end[1], 16) != crc32(line[: len(line) - len(end[0])]):
        raise DamagedError("is not as it was written (its checksum differs)")
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DamagedError(f"is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedError("is not a JSON object")
    found.pop(KEY, None)
    return found
