"""Encode integers, and lists of them, as a short string: positions are saved with every checkpoint for every group.

Each number is written in groups of seven bits (LEB128, as in DWARF 5, section 7.6), encoded as base 85. A checksum
detects damage.
"""

import zlib
from base64 import b85decode, b85encode
from typing import Any

from partita_schema.errors import ResumeError

Packed = int | list[Any] | None
"""None, an integer, or a list of such values."""
PLUS, MINUS, LIST, NONE = range(4)
"""Meaning of the two lowest bits: the number above them is the value, is -1 minus the value, or is a length."""
CHECKSUM = 2
"""Bytes of the checksum."""


def pack(value: Packed) -> str:
    """Return an ASCII string that JSON does not escape."""
    data = bytearray()
    add(value, data)
    return b85encode(checksum(data) + data).decode("ascii")


def unpack(text: Any) -> Packed:
    """Return the packed value. Raise ResumeError if the string is damaged."""
    if not isinstance(text, str):
        raise damaged()
    try:
        whole = b85decode(text)
    except ValueError:
        raise damaged() from None
    data = whole[CHECKSUM:]
    if not data or checksum(data) != whole[:CHECKSUM]:
        raise damaged()
    try:
        value, end = taken(data, 0)
    except IndexError:
        raise damaged() from None
    if end != len(data):
        raise damaged()
    return value


def add(value: Packed, data: bytearray) -> None:
    if value is None:
        add_number(NONE, data)
    elif isinstance(value, int):
        add_number(value << 2 | PLUS if value >= 0 else ~value << 2 | MINUS, data)
    else:
        add_number(len(value) << 2 | LIST, data)
        for item in value:
            add(item, data)


def add_number(number: int, data: bytearray) -> None:
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)


def taken(data: bytes, place: int) -> tuple[Packed, int]:
    """Return the value at `place`, and the position after it."""
    number, shift = 0, 0
    while data[place] > 127:
        number |= (data[place] & 127) << shift
        place, shift = place + 1, shift + 7
    number |= data[place] << shift
    place += 1
    kind, number = number & 3, number >> 2
    if kind == PLUS:
        return number, place
    if kind == MINUS:
        return ~number, place
    if kind == NONE:
        return None, place
    items = []
    for _ in range(number):
        item, place = taken(data, place)
        items.append(item)
    return items, place


def checksum(data: bytes | bytearray) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")[:CHECKSUM]


def damaged() -> ResumeError:
    """Return the error for an invalid position."""
    return ResumeError("the data position is damaged; continue from an older checkpoint")
