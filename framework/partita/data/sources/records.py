"""Records of text formats: the rows of a file one by one, and bad ones with their line.

A malformed row does not affect others: reading continues at the next line. A problem with the whole file (another
encoding, no header, a malformed JSON array) is a DataError.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from partita_schema.errors import DataError

MAX_RAW = 500
"""Maximum number of characters stored of a bad row."""
MAX_ROW_BYTES = 64_000_000
"""Default of `data.max_row_bytes`: maximum bytes of a line, or of a row that spans several lines."""
MAX_VALUES = 1_000_000
"""Maximum number of cells or JSON values in a row: each takes about a hundred bytes of memory."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class SourceRecord(NamedTuple):
    """A row of a text file, or the reason why it is bad."""

    number: int
    """Line in the file where the row starts, from 1."""
    row: bytes = b""
    """The row as a JSON object in UTF-8."""
    columns: tuple[str, ...] = ()
    """Column names of the row."""
    reason: str = ""
    """Why the row is bad; empty for a good one."""
    raw: str = ""
    """The content of a bad row."""


Reader = Callable[[BinaryIO, str, int], Iterator[SourceRecord]]
"""Reads a file: takes its bytes, its name and the maximum size of a row in bytes."""


def too_long(max_row_bytes: int) -> str:
    """Return the reason for a line above the limit."""
    return f"the line is longer than {max_row_bytes:,} bytes; write a larger data.max_row_bytes if it is meant"


write_json = json.JSONEncoder(ensure_ascii=False).encode
"""Like json.dumps, which creates an encoder for each row."""


def bad(number: int, reason: str, raw: str) -> SourceRecord:
    return SourceRecord(number, reason=reason, raw=raw[:MAX_RAW].encode("utf-8", "replace").decode())


def dump(row: dict[str, Any]) -> bytes:
    return write_json(row).encode("utf-8") + b"\n"


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"


def refuse_utf16(start: bytes, name: str) -> None:
    if start.startswith(UTF16_MARKS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
