"""What readers of text formats hand on: rows of a file one by one, and bad ones with their line.

A broken row never takes others with it: reading goes on at the next line. What breaks a whole file (another encoding,
no header, a broken JSON array) is a DataError.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from partita_schema.errors import DataError

MAX_RAW = 500
"""Characters of a bad row that are kept."""
MAX_ROW_BYTES = 64_000_000
"""Bytes of a line, or of a row that spans lines, that are read where `data.max_row_bytes` does not say otherwise."""
MAX_VALUES = 1_000_000
"""Cells or JSON values of a row: each takes about a hundred bytes of memory, however short it is in the file."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class SourceRecord(NamedTuple):
    """A row of a text file, or what is wrong with it."""

    number: int
    """Line in the file where the row starts, from 1."""
    row: bytes = b""
    """The row as a JSON object in UTF-8."""
    columns: tuple[str, ...] = ()
    """Names in the row."""
    reason: str = ""
    """Why the row is bad; empty for a good one."""
    raw: str = ""
    """What stands there, for bad rows."""


Reader = Callable[[BinaryIO, str, int], Iterator[SourceRecord]]
"""A reader is given a file's bytes, its name, and the bytes of its longest row."""


def too_long(max_row_bytes: int) -> str:
    """The reason for a line above the limit."""
    return f"the line is longer than {max_row_bytes:,} bytes; write a larger data.max_row_bytes if it is meant"


write_json = json.JSONEncoder(ensure_ascii=False).encode
"""As json.dumps, which makes an encoder for each row."""


def bad(number: int, reason: str, raw: str) -> SourceRecord:
    return SourceRecord(number, reason=reason, raw=raw[:MAX_RAW].encode("utf-8", "replace").decode())


def dump(row: dict[str, Any]) -> bytes:
    return write_json(row).encode("utf-8") + b"\n"


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at place {error.start + 1}"


def refuse_utf16(start: bytes, name: str) -> None:
    if start.startswith(UTF16_MARKS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
