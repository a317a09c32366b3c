"""JSON with a checksum, so that damaged state is detected when it is read.

A document is an object whose key `checksum` is a hash of all other keys, independent of order and layout. A journal
line is an object whose last key is a hash of the bytes before it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from partita_schema.common.hashing import json_digest
from partita_schema.common.json_text import parse_json

KEY = "checksum"
LINE_END = re.compile(rb', "checksum": "([0-9a-f]{8})"\}\n?\Z')


class DamagedError(ValueError):
    """Saved state that is damaged. The text completes the name of the file: `is not JSON (...)`."""


# Documents


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with a checksum of everything else in it."""
    body = {key: value for key, value in document.items() if key != KEY}
    return {**body, KEY: document_sum(body)}


def unsealed(text: str | bytes, *, required: bool = False) -> dict[str, Any]:
    """Return the document of a JSON text without its checksum.

    A document without a checksum, such as one written by hand, is accepted unless `required` is set.

    Raises:
        DamagedError: The text is not a JSON object, or the checksum is wrong or missing.
    """
    try:
        document = parse_json(text)
    except ValueError as error:  # invalid JSON, or bytes that are not UTF-8
        raise DamagedError(f"is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise DamagedError("is not a JSON object")
    written = document.pop(KEY, None)
    if (written is not None or required) and written != document_sum(document):
        raise DamagedError("is not as it was written (its checksum differs)")
    return document


def document_sum(document: Mapping[str, Any]) -> str:
    """Return a hash of a document that does not depend on the order of its keys."""
    as_read = json.loads(json.dumps(document))  # converts numeric keys to strings and tuples to lists
    return json_digest(as_read)[:16]


# Lines


def sealed_line(line: bytes) -> bytes:
    """Return a line, which must be a non-empty JSON object, with a checksum as its last key."""
    body = line.removesuffix(b"\n").removesuffix(b"}")
    return body + f', "{KEY}": "{crc32(body):08x}"}}\n'.encode()


def unsealed_line(line: bytes, *, required: bool = True) -> dict[str, Any]:
    """Return the object of a line without its checksum. Raises DamagedError if it is damaged."""
    end = LINE_END.search(line[-40:])
    if end is None and required:
        raise DamagedError("has no checksum")
    if end is not None and int(end[1], 16) != crc32(line[: len(line) - len(end[0])]):
        raise DamagedError("is not as it was written (its checksum differs)")
    try:
        document = parse_json(line)
    except ValueError as error:
        raise DamagedError(f"is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise DamagedError("is not a JSON object")
    document.pop(KEY, None)
    return document
