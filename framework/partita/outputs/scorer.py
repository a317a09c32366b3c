"""Metrics of answers, by output; each type defines its own.

All rows count: unreadable answers (`invalid`) and rows without an answer (`errors`) are wrong, and their shares are
reported; `n` is the number of rows. Rows that cannot be scored, such as those without a reference, are excluded;
`Model.evaluate` reports their number as `skipped`. Metrics are accumulated row by row, independent of the row order,
without storing texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from partita.outputs.decode import Decoded
from partita.outputs.registry import output_types
from partita_schema.config import Config


@dataclass(frozen=True)
class OutputScores:
    """Metrics by output; empty if no row was scored."""

    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each output, by name."""
    overall: Mapping[str, float] = field(default_factory=dict)
    """exact_match: the share of rows with every output right; n: the number of rows."""
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables of each output, by name, such as the metrics of each label; see `Metrics.details`."""

    @property
    def flat(self) -> dict[str, float]:
        """All metrics in one dictionary: `output.metric`, and those of `overall` by their own names."""
        named = {f"{name}.{metric}": value for name, scores in self.outputs.items() for metric, value in scores.items()}
        return named | dict(self.overall)


class RowScore(NamedTuple):
    """The score of one output of a row."""

    right: bool
    of_row: Mapping[str, Any] | None = None
    """See `Metrics.of_row`."""
    closest: int = 0
    """Which of several correct answers the value was compared with."""


class Scorer:
    """Accumulates metrics row by row."""

    def __init__(self, config: Config) -> None:
        self._outputs = output_types(config)
        self._metrics = {name: output.metrics() for name, output in self._outputs.items()}
        self._counts = {feature.name: _Counts() for feature in config.output_features}
        self._in_sequence = config.answers_in_sequence
        self._rows = self._all_right = 0

    def add(
        self,
        truth: Mapping[str, Any],
        decoded: Decoded,
        *,
        answered: bool,
        scores: Mapping[str, Any] | None = None,
        more_truths: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, RowScore]:
        """Score one row, and return the score of each output, by name.

        Args:
            truth: The row by feature name, with the reference of each output.
            decoded: The values of the answer.
            answered: Whether there is an answer.
            scores: Log probability of each label, if labels were scored; by output if answers follow one another.
            more_truths: The row with each other correct answer, if there are several.
        """
        row = {}
        for name, metrics in self._metrics.items():
            output, value, valid = self._outputs[name], decoded.values[name], name not in decoded.errors
            references, closest = [output.truth_of(one) for one in (truth, *more_truths)], 0
            if len(references) > 1 and valid:
                closest = output.closest(references, value)
            self._counts[name].add(answered=answered, valid=valid)
            right = metrics.add_any(references, value, closest=closest, valid=valid)
            row[name] = RowScore(right, metrics.of_row, closest)
            metrics.add_scores(references[closest], scores_of(name, scores, in_sequence=self._in_sequence))
        self._rows += 1
        self._all_right += all(score.right for score in row.values())
        return row

    def scores(self) -> OutputScores:
        """Return the metrics of all rows so far."""
        if not self._rows:
            return OutputScores()
        outputs = {
            name: metrics.results(self._rows) | self._counts[name].results() for name, metrics in self._metrics.items()
        }
        overall = {"exact_match": self._all_right / self._rows, "n": float(self._rows)}
        details = {name: metrics.details() for name, metrics in self._metrics.items()}
        return OutputScores(outputs, overall, details)


def scores_of(name: str, scores: Mapping[str, Any] | None, *, in_sequence: bool) -> Mapping[str, float] | None:
    """Return the log probabilities of the labels of an output, from those of an answer; None without any.

    Args:
        name: Name of the output.
        scores: Log probability of each label; by output if answers follow one another.
        in_sequence: Whether answers follow one another.
    """
    return (scores or {}).get(name) if in_sequence else scores


class _Counts:
    """Counts of rows, unreadable answers, and rows without an answer."""

    def __init__(self) -> None:
        self.rows = self.invalid = self.errors = 0

    def add(self, *, answered: bool, valid: bool) -> None:
        self.rows += 1
        self.errors += not answered
        self.invalid += answered and not valid

    def results(self) -> dict[str, float]:
        return {"invalid": self.invalid / self.rows, "errors": self.errors / self.rows, "n": float(self.rows)}
