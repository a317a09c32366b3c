"""The output type number: find the number in an answer.

Supported are decimal numbers with a sign, also before a currency symbol (`-$5`), thousands separators, an exponent,
and a scale (`12.5k`, `2 million`). Numeric dates are skipped. A letter that may be a scale or a unit (`3M`, `300K`)
makes the answer unreadable, because the value would be a guess.
"""

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from partita.outputs.base import Metrics, OutputType, Reader, ReadError, clip, exact_sum
from partita_schema.sections.outputs.number import NumberDecoder, NumberOutput

if TYPE_CHECKING:
    from partita.lm.heads.base import Head

SEPARATORS = ",_'\u2019 \u00a0\u202f"
"""Thousands separators; a number must use the same one throughout."""
SCALES = {"k": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten by the letter or word directly after a number."""

# A sign directly after a digit, a letter or a bracket is an operator ("5-3"), not part of the number.
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]])[-+\u2212](?:[$\u20ac\u00a3\u00a5\u20b9] ?)?)?"
    rf"(?P<digits>[1-9][0-9]{{0,2}}(?P<separator>[{SEPARATORS}])[0-9]{{3}}(?:(?P=separator)[0-9]{{3}})*(?![0-9])"
    rf"(?:\.[0-9]+)?"
    rf"|[0-9]+(?:\.[0-9]+)?"
    rf"|(?<![0-9])\.[0-9]+)"
    rf"(?:(?P<power>[eE][-+]?[0-9]+)"
    rf"|(?P<letter>k)\b|[- \u00a0]?(?P<word>(?i:thousand|million|billion|trillion))\b"
    rf"|(?P<unclear>(?:[KMB]|[bm]n)\b))?"
)
DATE = re.compile(
    r"(?<![\w./-])(?:[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\2[0-9]{4})(?![0-9]|[-/][0-9])"
    r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?)?"
)


class NumberType(OutputType[NumberOutput]):
    """A number."""

    column: ClassVar = "number"

    def reader(self, labels: Sequence[str]) -> Reader:
        return NumberReader(self.feature.decoder)

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.base import RegressionHead

        return RegressionHead(minimum=self.feature.decoder.minimum, maximum=self.feature.decoder.maximum)

    def metrics(self) -> "NumberMetrics":
        return NumberMetrics()


class NumberReader(Reader):
    """Finds a number in a text and checks its range."""

    def __init__(self, decoder: NumberDecoder) -> None:
        self._decoder = decoder
        self._regex = re.compile(decoder.regex) if decoder.regex is not None else None

    def read(self, text: str) -> float:
        """Return the number, as an int if it is written as a whole number. Raise ReadError."""
        return self.check(_value(self._find(text)))

    def read_member(self, member: Any) -> Any:
        """Return a number as it is, and find the number in other values."""
        if isinstance(member, int | float) and not isinstance(member, bool):
            return self.check(member)
        return super().read_member(member)

    def check(self, value: float) -> float:
        """Return the number unchanged. Raise ReadError if it is not finite or out of range."""
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

    def _find(self, text: str) -> re.Match[str]:
        """Return the selected match of NUMBER. Raise ReadError if there is none."""
        matches = list(_numbers(text) if self._regex is None else self._regex.finditer(text))
        if not matches:
            raise ReadError(f"no number in {clip(text)}")
        match = matches[0 if self._decoder.pick == "first" else -1]
        if self._regex is None:
            return match
        picked = (match.group(1) if self._regex.groups else None) or match.group()
        number = next(_numbers(picked), None)
        if number is None:
            raise ReadError(f"the regex found {clip(picked)}, which is not a number")
        return number


def _numbers(text: str) -> Iterator[re.Match[str]]:
    """Yield the numbers in a text, without dates."""
    # The mark separates the text on both sides of a date.
    return NUMBER.finditer(DATE.sub("|", text))


def _value(number: re.Match[str]) -> float:
    """Return the value of a match. Raise ReadError if its scale is ambiguous."""
    if number["unclear"]:
        raise ReadError(
            f"{clip(number.group())} may hold a scale or a unit; ask for all digits in the prompt, or say with "
            "decoder.regex what counts"
        )
    sign = "-" if number["sign"] and number["sign"][0] in "-\u2212" else ""
    digits = sign + number["digits"].translate({ord(mark): None for mark in SEPARATORS})
    scale = (number["letter"] or number["word"] or "").lower()
    value = float(f"{digits}e{SCALES[scale]}" if scale else digits + (number["power"] or ""))
    if scale:
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    # Above 2**53 a float, and with it the rest of the program, cannot represent every integer.
    whole = digits.lstrip("-").isdigit() and not number["power"] and abs(value) < 2**53
    return int(digits) if whole else value


class NumberMetrics(Metrics):
    """exact_match; over the numeric answers mae, mse and rmse (infinite without any) and r2."""

    def __init__(self) -> None:
        self.right = 0
        self.errors = array("d")
        self.truths = array("d")

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        if not valid:
            return False
        error = float(value) - float(truth)
        self.errors.append(abs(error))
        self.truths.append(float(truth))
        right = math.isclose(value, truth, rel_tol=1e-9, abs_tol=1e-12)
        self.right += right
        return right

    def results(self, rows: int) -> dict[str, float]:
        count = len(self.errors)
        mae = exact_sum(self.errors) / count if count else math.inf
        mse = exact_sum(error * error for error in self.errors) / count if count else math.inf
        return {
            "exact_match": self.right / rows,
            "mae": mae,
            "mse": mse,
            "rmse": math.sqrt(mse),
            "r2": self._r2(mse) if count else -math.inf,
        }

    def _r2(self, mse: float) -> float:
        """Return the coefficient of determination; if all references are equal, 1 without errors and 0 with."""
        if not math.isfinite(mse):
            return -math.inf
        mean = exact_sum(self.truths) / len(self.truths)
        variance = exact_sum((truth - mean) * (truth - mean) for truth in self.truths) / len(self.truths)
        if not variance or min(self.truths) == max(self.truths):  # the mean of equal numbers may differ from them
            return 0.0 if mse else 1.0
        return 1 - mse / variance
