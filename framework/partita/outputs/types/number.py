"""The output type number: find the number in an answer.

Supported are decimal numbers with a sign, also before a currency symbol (`-$5`), thousands separators, an exponent,
and a scale (`12.5k`, `2 million`). Numeric dates are skipped. If the value would be a guess, the answer is unreadable:
after a letter or word that may be a scale or a unit (`3M`, `300 K`), and if the number continues in a way that has
several readings (`12,5`, `1.2.3`) or is not supported (`1.5 x 10^6`).
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

SPACES = " \u00a0\u2009\u202f"
SEPARATORS = f",_'\u2019{SPACES}"
"""Thousands separators; a number must use the same one throughout."""
DASHES = "-\u2010\u2011\u2012\u2013\u2212\uff0d"
"""Characters that are written for a minus."""
CURRENCIES = "$\u20ac\u00a3\u00a5\u20b9"
SCALES = {"k": 3, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten by the letter or word after a number."""

# At the start of an answer that is no list, a sign may have a space after it. Directly after a digit, a letter, a
# bracket or a unit it is an operator or a range ("5-3", "10%-20%"), not part of the number.
SIGN = (
    rf"\A\s*[{DASHES}][{SPACES}](?!(?s:.*)\n[ \t]*[{DASHES}][{SPACES}])(?:[{CURRENCIES}][{SPACES}]?)?"
    rf"|(?<![\w)\]%\u00b0])(?<![0-9][{CURRENCIES}])(?<![0-9][{SPACES}][{CURRENCIES}])"
    rf"[{DASHES}+](?:[{CURRENCIES}][{SPACES}]?)?"
)
SUPERSCRIPTS = r"\u00b2\u00b3\u00b9\u2070-\u207e"
EXPONENT = rf"(?:[{SPACES}]?\^[{SPACES}]?[{DASHES}+({{]*[0-9]+\}}?|\*\*[{DASHES}+]?[0-9]+|[{SUPERSCRIPTS}]+)"
# The rest of 12,5, 1,00,000 and 1.2.3, also in LaTeX, of 2\u00bd, of 10^6 and of 1.5 x 10^6.
REST = (
    r"(?:(?:,?\\[,!]|\{,\}|[,._'\u2019])[0-9]+)+"
    rf"|[{SPACES}]?[\u00bc-\u00be\u2150-\u215e]"
    rf"|{EXPONENT}"
    rf"|[{SPACES}]?(?:[x*\u00b7\u00d7\u22c5]|\\times|\\cdot)[{SPACES}]?10{EXPONENT}"
)
NUMBER = re.compile(
    rf"(?P<sign>{SIGN})?"
    rf"(?P<digits>[1-9][0-9]{{0,2}}(?P<separator>[{SEPARATORS}])[0-9]{{3}}(?:(?P=separator)[0-9]{{3}})*(?![0-9])"
    rf"(?:\.[0-9]+)?"
    rf"|[0-9]+(?:\.[0-9]+)?"
    rf"|(?<![0-9.])\.[0-9]+)"
    rf"(?:[eE](?P<power>[{DASHES}+]?[0-9]+))?"
    rf"(?:(?P<rest>{REST})"
    rf"|[{SPACES}]?(?P<letter>k)\b|[-{SPACES}]?(?P<word>(?i:thousand|million|billion|trillion))(?i:s?)\b"
    rf"|[{SPACES}]?(?P<unclear>[KMB]|(?i:[bm]n|hundreds?|dozens?|lakhs?|crores?))\b)?"
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
    """Return the value of a match. Raise ReadError if it is ambiguous."""
    scale = (number["letter"] or number["word"] or "").lower()
    power = number["power"]
    if number["rest"] or (scale and power):
        raise ReadError(
            f"{clip(number.group().strip())} has several readings or is not supported; ask for plain digits with a "
            "decimal point in the prompt, or say with decoder.regex what counts"
        )
    if number["unclear"]:
        raise ReadError(
            f"{clip(number.group().strip())} may hold a scale or a unit; ask for all digits in the prompt, or say with "
            "decoder.regex what counts"
        )
    sign = -1 if set(DASHES) & set(number["sign"] or "") else 1
    digits = number["digits"].translate({ord(mark): None for mark in SEPARATORS})
    exponent = SCALES[scale] if scale else (power or "0").translate({ord(mark): "-" for mark in DASHES})
    value = sign * float(f"{digits}e{exponent}")
    if scale:
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    whole = not power and "." not in digits and math.isfinite(value)
    return sign * int(digits.lstrip("0") or "0") if whole else value


class NumberMetrics(Metrics):
    """exact_match; over the numeric answers mae, mse and rmse (infinite without any) and r2.

    Whole numbers match if they are equal, others up to a relative difference of 1e-9.
    """

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
        right = _is_right(value, truth)
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


def _is_right(value: float, truth: float) -> bool:
    """Return whether a number is the true one; one that is not whole is only compared up to rounding."""
    if not _is_whole(truth):
        return math.isclose(value, truth, rel_tol=1e-9)
    return value == truth if _is_whole(value) else math.isclose(value, truth, rel_tol=1e-15, abs_tol=1e-12)


def _is_whole(number: float) -> bool:
    """Return whether a number is an integer; floats above 2**53 may be rounded."""
    return isinstance(number, int) or (number.is_integer() and abs(number) < 2**53)
