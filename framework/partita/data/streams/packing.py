"""Whole numbers, and lists of such, as a short text: positions are written with every checkpoint, for every lane.

Each number is written in groups of seven bits (LEB128, as in DWARF 5, section 7.6), the text is base 85. A checksum
tells damage.
"""

import zlib
from base64 import b85decode, b85encode
from typing import Any

from partita_schema.errors import ResumeError

Packed = int | list[Any] | None
"""None, a whole number, or a list of the same."""
PLUS, MINUS, LIST, NONE = range(4)
"""What the last two bits of a group say: the number above them is itself, is -1 minus itself, or is a length."""
CHECKSUM = 2
"""Bytes of it."""


def pack(value: Packed) -> str:
    """A text of ASCII characters that JSON keeps as they are."""
    data = bytearray()
    add(value, data)
    return b85encode(checksum(data) + data).decode("ascii")


def unpack(text: Any) -> Packed:
    """What was packed. Raises ResumeError where it is damaged."""
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
    """The value at a place, and the place behind it."""
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
    """The error of a position that makes no sense."""
    return ResumeError("the data position is damaged; continue from an older checkpoint")
