"""Memory sizes as users write them: 12GB, 1.5GiB, bytes, or a fraction of the device's memory."""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

from partita_schema.base import ExpectedText, refuse_boolean, rule_error

MEGABYTE = 10**6
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
CHOICES = "bytes, a text such as 12GB, or a share such as 0.5"


def parse_memory(value: object) -> int | float:
    """Return bytes as an int, or a fraction of the device's memory (above 0, at most 1) as a float.

    KB, MB, GB and TB are powers of 1000, KiB to TiB powers of 1024; case and a space before the unit do not matter. A
    number above 1 is in bytes.

    Raises:
        PydanticCustomError: The value is not a size, or below 1 MB. The text says what to write.
    """
    if isinstance(value, str):
        return parse_text(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise rule_error(f"got {value!r}; write {CHOICES}")
    return parse_number(value)


def parse_text(text: str) -> int | float:
    # The limit on digits keeps the number finite.
    match = re.fullmatch(r"([0-9]{1,15}|[0-9]{0,15}\.[0-9]{1,15})\s*([kmgt])(i?)(b?)", text.strip(), re.IGNORECASE)
    if match:
        number, letter, binary, byte = match.groups()
        if not byte:
            raise rule_error(f"got {text!r}; write {number}{letter.upper()}B or {number}{letter.upper()}iB")
        return in_bytes(float(number) * (1024 if binary else 1000) ** POWERS[letter.lower()], written=text)
    percent = re.fullmatch(r"([0-9]{1,2}(\.[0-9]{1,9})?|100)\s*%", text.strip())
    if percent and float(percent[1]) > 0:
        raise rule_error(f"got {text!r}; write {float(percent[1]) / 100:g}")
    if text.strip().lower() in ("auto", "none", "null"):
        raise rule_error(f"got {text!r}; remove the key for what is free, or write {CHOICES}")
    try:
        alone = float(text)
    except ValueError:
        raise rule_error(f"got {text!r}; write {CHOICES}") from None
    return parse_number(alone)


def parse_number(number: float) -> int | float:
    if number <= 0 or (isinstance(number, float) and not math.isfinite(number)):
        raise rule_error(f"got {number}; write {CHOICES}")
    if number <= 1:
        return float(number)
    if number < MEGABYTE:
        # 12 hardly means bytes, and 8192 hardly means gigabytes.
        raise rule_error(
            f"got {number:.15g}; write {number:.15g}{'GB' if number < 256 else 'MB'}, or a share such as 0.5"
        )
    return int(number)


def in_bytes(number: float, *, written: str) -> int:
    if number < MEGABYTE:
        raise rule_error(f"got {written!r}, less than 1MB; write {CHOICES}")
    return round(number)


def check_memory(value: object) -> object:
    """Return the value as written if it is a valid memory size."""
    if isinstance(value, str | int | float):
        parse_memory(refuse_boolean(value))
    return value


Memory = Annotated[str | int | float, BeforeValidator(check_memory), ExpectedText(CHOICES)]
"""A memory size, stored as written; `parse_memory` converts it."""
