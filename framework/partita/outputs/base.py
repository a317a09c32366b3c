"""The protocol of output types: decoding, metrics and columns of predictions.

A type of output is one file here and one in `partita_schema.sections.outputs`; `registry` is the table. Other code
asks the object of a type and does not look at which type it is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from partita_schema.cells import compact_json
from partita_schema.sections.features import InputFeature
from partita_schema.sections.outputs import OutputFeature

if TYPE_CHECKING:
    from partita.lm.heads.base import Head

ColumnType = Literal["boolean", "integer", "number", "text", "json", "vector"]
"""vector: a list of numbers in single precision. json: any value that fits none of the other types; written as JSON
text to formats without nested values."""
Feature = TypeVar("Feature", bound=OutputFeature)


class ReadError(ValueError):
    """An answer without a value of the expected type; the text says why. It never leaves the decoder."""


class Reader(ABC):
    """Decodes the values of an output."""

    accepts_null: ClassVar[bool] = False
    """Whether null in the JSON object of several outputs is a value, and not a missing one."""

    @abstractmethod
    def read(self, text: str) -> Any:
        """Return the value of an answer. Raise ReadError."""

    def read_member(self, member: Any) -> Any:
        """Return the value of a member of the JSON object of several outputs. Raise ReadError."""
        return self.read(member if isinstance(member, str) else compact_json(member))

    def missing(self, reason: str) -> Any:
        """Return the value of an output that is missing in the answer. Raise ReadError if there is none."""
        raise ReadError(reason)


class Metrics(ABC):
    """Metrics of one output, accumulated row by row."""

    of_row: Mapping[str, Any] | None = None
    """What the row that was added last contributes to metrics, by name, as JSON values: for intervals of metrics that
    cannot be computed again from reference and value in a short time. None if there are no such metrics."""

    @abstractmethod
    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        """Add one row and return whether it is right; `value` is only meaningful if `valid`."""

    def add_any(self, truths: Sequence[Any], value: Any, *, closest: int, valid: bool) -> bool:
        """Add one row with several correct answers and return whether it is right for one of them.

        Args:
            truths: The correct answers.
            value: The value; only meaningful if `valid`.
            closest: Index of the correct answer that the value is compared with, if it is one only.
            valid: Whether there is a value.
        """
        return self.add(truths[closest], value, valid=valid)

    def add_scores(self, truth: Any, scores: Mapping[str, float] | None) -> None:
        """Add the log probabilities of all labels for one row, None if it has none. Most metrics do not use them."""
        return

    @abstractmethod
    def results(self, rows: int) -> dict[str, float]:
        """Return the metrics of all rows so far, at least one."""

    def details(self) -> dict[str, Any]:
        """Return tables that are not single numbers, by name: JSON values. Often there are none."""
        return {}


class OutputType(ABC, Generic[Feature]):
    """What a run does with an output."""

    column: ClassVar[ColumnType] = "text"
    """Type of the column of values."""

    def __init__(self, feature: Feature, *, inputs: Sequence[InputFeature] = ()) -> None:
        self.feature, self.inputs = feature, inputs

    @abstractmethod
    def reader(self, labels: Sequence[str]) -> Reader:
        """Return the decoder. `labels` are those of the answers; empty if the type has none."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Return new metrics, without rows."""

    def head(self, labels: Sequence[str]) -> "Head":
        """Return the head that predicts the value. `labels` are those of the model; empty if they are not known yet."""
        raise AssertionError(f"an output of type {self.feature.type} has no head")

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        """Return the number of tokens that an answer needs; None if unknown.

        Args:
            labels: Labels of the data, if the file lists none.
            count: Returns the number of tokens of a text.
        """
        return self.feature.length_limit

    def truth_of(self, row: Mapping[str, Any]) -> Any:
        """Return the reference of a row, by feature name, as `metrics` expects it."""
        return row[self.feature.name]

    def closest(self, truths: Sequence[Any], value: Any) -> int:
        """Return the index of the correct answer that a value is compared with: one that it equals, or the first."""
        return next((index for index, truth in enumerate(truths) if self.metrics().add(truth, value, valid=True)), 0)

    def columns(self) -> dict[str, ColumnType]:
        """Return the columns of predictions, with their types."""
        return {self.feature.name: self.column, f"{self.feature.name}_raw": "text"}

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        """Return a row's values of `columns`.

        Args:
            value: The decoded value; None if the answer is unreadable.
            raw: The part of the answer that the value was read from.
            scores: Log probabilities of labels, if they were scored.
        """
        return {self.feature.name: value, f"{self.feature.name}_raw": raw}

    def log_probabilities(self, scores: Mapping[str, float] | None) -> Mapping[str, float] | None:
        """Return the log probability of each label, from the scores of an answer; None without scored labels."""
        return None

    def cells_of_row(self, value: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """Return values of `columns` that depend on the row, and why the value is incomplete, if it is.

        Args:
            value: The decoded value; None if there is none.
            row: The row by column.
        """
        return {}, None


class HeadOutputType(OutputType[Feature]):
    """An output whose value is predicted by a head, without any text of an answer."""

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        return 0

    def columns(self) -> dict[str, ColumnType]:
        return {self.feature.name: self.column}

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        return {self.feature.name: value}


def clip(text: str, *, most: int = 60) -> str:
    """Return the text in quotes, with the middle left out if it is long."""
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return repr(text)


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once, independent of the order."""
    try:
        return math.fsum(values)
    except OverflowError:  # finite values near the maximum of a float
        return math.inf
