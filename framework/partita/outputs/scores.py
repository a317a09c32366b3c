"""Metrics of answers, by output; each type defines its own.

All rows count: unreadable answers (`invalid`) and rows without an answer (`errors`) are wrong, and their shares are
reported; `n` is the number of rows. Rows that cannot be scored, such as those without a reference, are excluded;
`Model.evaluate` reports their number as `skipped`. Metrics are accumulated row by row, independent of the row order,
without storing texts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    @property
    def flat(self) -> dict[str, float]:
        """All metrics in one dictionary: `output.metric`, and those of `overall` by their own names."""
        named = {f"{name}.{metric}": value for name, scores in self.outputs.items() for metric, value in scores.items()}
        return named | dict(self.overall)


class Scorer:
    """Accumulates metrics row by row."""

    def __init__(self, config: Config) -> None:
        self._metrics = {name: output.metrics() for name, output in output_types(config).items()}
        self._counts = {feature.name: _Counts() for feature in config.output_features}
        self._rows = self._all_right = 0

    def add(self, truth: Mapping[str, Any], decoded: Decoded, *, answered: bool) -> None:
        """Score one row.

        Args:
            truth: The reference of each output, by name.
            decoded: The values of the answer.
            answered: Whether there is an answer.
        """
        right = [self._add_output(name, truth[name], decoded, answered=answered) for name in self._metrics]
        self._rows += 1
        self._all_right += all(right)

    def scores(self) -> OutputScores:
        """Return the metrics of all rows so far."""
        if not self._rows:
            return OutputScores()
        outputs = {
            name: metrics.results(self._rows) | self._counts[name].results() for name, metrics in self._metrics.items()
        }
        return OutputScores(outputs, {"exact_match": self._all_right / self._rows, "n": float(self._rows)})

    def _add_output(self, name: str, truth: Any, decoded: Decoded, *, answered: bool) -> bool:
        valid = name not in decoded.errors
        self._counts[name].add(answered=answered, valid=valid)
        return self._metrics[name].add(truth, decoded.values[name], valid=valid)


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
