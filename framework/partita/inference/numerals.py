"""The number that an answer holds: decimal, with thousands separators, a sign, or a power of ten."""

import math
import re

from partita.inference.reading import ReadError, clipped
from partita_schema.features import NumberDecoder

SEPARATORS = ",\u00a0\u202f"
"""Comma, no-break space and narrow no-break space between groups of three digits."""

# A sign right behind a digit, a letter or a bracket is an operator ("5-3"), not part of the number.
NUMBER = re.compile(
    rf"(?:(?<![\w)\]])[-+\u2212])?"
    rf"(?:[0-9]{{1,3}}(?:[{SEPARATORS}][0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?"
    rf"|[0-9]+(?:\.[0-9]+)?"
    rf"|(?<![0-9])\.[0-9]+)"
    rf"(?:[eE][-+]?[0-9]+)?"
)


class NumberReader:
    """Finds a number in a text and holds it to its range."""

    def __init__(self, decoder: NumberDecoder) -> None:
        self._decoder = decoder
        self._regex = re.compile(decoder.regex) if decoder.regex is not None else None

    def read(self, text: str) -> float:
        """The number; an int where it is written as one. Raises ReadError."""
        found = [match.group() for match in NUMBER.finditer(text)] if self._regex is None else self._matches(text)
        if not found:
            raise ReadError(f"no number stands in {clipped(text)}")
        picked = found[0 if self._decoder.pick == "first" else -1]
        number = NUMBER.search(picked)
        if number is None:
            raise ReadError(f"the regex found {clipped(picked)}, which is no number")
        return self.check(_value(number.group()))

    def check(self, value: float) -> float:
        """The same number. Raises ReadError where it is not finite or out of range."""
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise ReadError("the number is too large")
        low, high = self._decoder.minimum, self._decoder.maximum
        if low is not None and value < low:
            raise ReadError(f"{value:g} is below the minimum {low:g}")
        if high is not None and value > high:
            raise ReadError(f"{value:g} is above the maximum {high:g}")
        return value

    def _matches(self, text: str) -> list[str]:
        assert self._regex is not None
        groups = self._regex.groups
        return [(match.group(1) if groups else None) or match.group() for match in self._regex.finditer(text)]


def _value(text: str) -> float:
    plain = text.replace("\u2212", "-").translate({ord(mark): None for mark in SEPARATORS})
    value = float(plain)
    # Above 2**53 a float no longer holds every whole number, and nothing else in the program would either.
    whole = plain.lstrip("+-").isdigit() and abs(value) < 2**53
    return int(plain) if whole else value
