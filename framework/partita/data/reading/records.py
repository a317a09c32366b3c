"""What readers of text formats hand on: rows of a file one by one, and bad ones with their line.

A broken row never takes others with it: reading goes on at the next line. What breaks a whole file (another encoding,
no header, a broken JSON array) is a DataError.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from partita_schema.errors import DataError

MAX_RAW = 500
"""Characters of a bad row that are kept."""
MAX_ROW_CHARACTERS = 1 << 24
"""Characters of a row that spans lines; a longer one is a quote or a bracket that was never closed."""
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Record:
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


Reader = Callable[[BinaryIO, str], Iterator[Record]]
"""A reader is given a file's bytes and its name."""


def bad(number: int, reason: str, raw: str) -> Record:
    return Record(number, reason=reason, raw=raw[:MAX_RAW].encode("utf-8", "replace").decode())


def dump(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at place {error.start + 1}"


def refuse_utf16(start: bytes, name: str) -> None:
    if start.startswith(UTF16_MARKS):
        raise DataError(f"{name} is UTF-16; save it as UTF-8")
