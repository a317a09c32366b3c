"""The output type number."""

import decimal
import math
import numbers
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from partita_schema.base import ConfigModel, Name, Number, check_regex, rule_error
from partita_schema.cells import NUMBER, CellError, shown
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell, ValuePreprocessing
from partita_schema.sections.outputs.grammar_rules import json_rule


class NumberDecoder(ConfigModel):
    """Extraction of a number from an answer."""

    type: Literal["number_extractor"] = "number_extractor"
    """Extract a number."""
    regex: Name | None = None
    """Regular expression for the number: its first group, or the whole match if it has no group. Default: any decimal
    number; thousands separators are allowed."""
    pick: Literal["first", "last"] = "first"
    """Which number to use if the answer contains several."""
    minimum: Number | None = None
    """Smallest valid number; a smaller one is an invalid answer. Default: no limit."""
    maximum: Number | None = None
    """Largest valid number; a larger one is an invalid answer. Default: no limit."""

    @model_validator(mode="after")
    def range_is_not_empty(self) -> "NumberDecoder":
        if self.regex is not None:
            check_regex(self.regex, at="regex")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise rule_error(
                f"minimum {self.minimum:g} is above maximum {self.maximum:g}; no number could be valid", at="minimum"
            )
        return self


class NumberOutput(OutputBase):
    """A numeric answer."""

    type: Literal["number"]
    """Number."""
    head: HeadName | None = None
    """Predict with a layer on top of the model in place of generated text. linear: a linear layer, as in
    AutoModelForSequenceClassification of transformers. Default: linear for encoders such as BERT, otherwise no head."""
    preprocessing: ValuePreprocessing = ValuePreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: NumberDecoder = NumberDecoder.model_construct()
    """How a number is extracted from an answer."""

    METRICS: ClassVar = {"exact_match": "higher", "mae": "lower", "mse": "lower", "rmse": "lower", "r2": "higher"}
    can_have_head: ClassVar = True

    def cell_reader(self) -> ReadCell:
        return self._read_cell

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return the number itself."""
        return (float(value),)

    def grammar(self, rule: str, *, seen: Sequence[str], alone: bool) -> list[str]:
        limits = {"minimum": self.decoder.minimum, "maximum": self.decoder.maximum}
        return [json_rule(rule, {"type": "number"} | {name: most for name, most in limits.items() if most is not None})]

    def _read_cell(self, value: Any) -> int | float:
        text = str(value).strip()
        if isinstance(value, bool) or not isinstance(value, str | numbers.Real | decimal.Decimal):
            raise CellError(f"{shown(value)} is not a number")
        if not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
            raise CellError(f"{shown(value)} is not a finite number")
        number, minimum, maximum = float(text), self.decoder.minimum, self.decoder.maximum
        if minimum is not None and number < minimum:
            raise CellError(f"{text} is below the decoder's minimum {minimum:g}")
        if maximum is not None and number > maximum:
            raise CellError(f"{text} is above the decoder's maximum {maximum:g}")
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
