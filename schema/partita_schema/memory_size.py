"""Amounts of memory as people write them: 12GB, 1.5GiB, bytes, or a share of what the device has."""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

from partita_schema.base import Words, broken, refuse_boolean

MEGABYTE = 10**6
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
CHOICES = "bytes, a text such as 12GB, or a share such as 0.5"


def parse_memory(value: object) -> int | float:
    """Bytes as an int, or a share of the device's memory, above 0 and at most 1, as a float.

    KB, MB, GB and TB are powers of 1000, KiB to TiB of 1024, in any case, with or without a space before. A number
    above 1 is in bytes; 1 is all there is. Raises a ValueError that says what to write, below 1 MB too.
    """
    if isinstance(value, str):
        return parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise broken(f"got {value!r}; write {CHOICES}")
    return parse_number(value)


def parse_text(text: str) -> int | float:
    # A limit on digits keeps the number finite.
    found = re.fullmatch(r"([0-9]{1,15}|[0-9]{0,15}\.[0-9]{1,15})\s*([kmgt])(i?)(b?)", text.strip(), re.IGNORECASE)
    if found:
        number, letter, binary, byte = found.groups()
        if not byte:
            raise broken(f"got {text!r}; write {number}{letter.upper()}B or {number}{letter.upper()}iB")
        return in_bytes(float(number) * (1024 if binary else 1000) ** POWERS[letter.lower()], written=text)
    percent = re.fullmatch(r"([0-9]{1,2}(\.[0-9]{1,9})?|100)\s*%", text.strip())
    if percent and float(percent[1]) > 0:
        raise broken(f"got {text!r}; write {float(percent[1]) / 100:g}")
    if text.strip().lower() in ("auto", "none", "null"):
        raise broken(f"got {text!r}; remove the key for what is free, or write {CHOICES}")
    try:
        alone = float(text)
    except ValueError:
        raise broken(f"got {text!r}; write {CHOICES}") from None
    return parse_number(alone)


def parse_number(number: float) -> int | float:
    if number <= 0 or (isinstance(number, float) and not math.isfinite(number)):
        raise broken(f"got {number}; write {CHOICES}")
    if number <= 1:
        return float(number)
    if number < MEGABYTE:
        # Nobody means bytes by 12, nor gigabytes by 8192.
        raise broken(f"got {number:.15g}; write {number:.15g}{'GB' if number < 256 else 'MB'}, or a share such as 0.5")
    return int(number)


def in_bytes(number: float, *, written: str) -> int:
    if number < MEGABYTE:
        raise broken(f"got {written!r}, less than 1MB; write {CHOICES}")
    return round(number)


def check_memory(value: object) -> object:
    """The value as it was written, once it is known to say an amount."""
    if isinstance(value, str | int | float):
        parse_memory(refuse_boolean(value))
    return value


Memory = Annotated[str | int | float, BeforeValidator(check_memory), Words(CHOICES)]
"""An amount of memory, kept as it was written; `parse_memory` reads it."""
