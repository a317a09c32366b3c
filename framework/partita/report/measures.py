"""The metrics of a split with their intervals, beside those of the base model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partita.report.evaluation import Evaluation, SplitResults
from partita.report.resampling import Blocks, difference_of, interval_of
from partita.report.row_metrics import estimates_of
from partita.report.statistics import Difference, Interval, right_difference, share_interval
from partita.runs.listing import full_name
from partita_schema.sections.outputs import direction_of

COUNTS = ("n", "skipped", "queries")
"""Metrics that are numbers of rows."""
TEXT_METRICS = ("perplexity", "bits_per_byte")
"""Metrics of language modelling, of which lower values are better."""


@dataclass(frozen=True)
class Measure:
    """A metric of the model, and of the base model on the same rows."""

    name: str
    result: Interval
    base: Interval | None = None
    difference: Difference | None = None
    """Result minus base; None without a base model, or without values of rows."""

    @property
    def has_interval(self) -> bool:
        """Whether the metric was resampled."""
        return math.isfinite(self.result.low)

    @property
    def is_better(self) -> bool:
        """Whether the result is better than the base; False if equal."""
        if self.base is None:
            return False
        apart = self.result.value - self.base.value
        return apart < 0 if lower_is_better(self.name) else apart > 0


@dataclass(frozen=True)
class SplitMeasures:
    """The metrics of a split."""

    split: str
    rows: int
    measures: Sequence[Measure]
    may_have_base: bool = True
    """Whether there is a base model to compare with: not if the model is new, or is the base model itself."""

    def main(self, wanted: Sequence[str]) -> Measure | None:
        """Return the metric that describes the model best: one of `wanted`, else the first of an output, else the loss.

        Args:
            wanted: Names of metrics, the best one first, as from `main_metrics`.
        """
        named = {measure.name: measure for measure in self.measures}
        found = [full_name(name, named) for name in wanted if name != "loss"]
        judged = [name for name in named if direction_of(name) and name != "loss"]
        return next((named[name] for name in (*found, *judged, "loss") if name in named), None)

    @property
    def has_base(self) -> bool:
        """Whether the base model was evaluated on the same rows."""
        return any(measure.base is not None for measure in self.measures)


def measures_of(results: SplitResults, *, is_plain_text: bool = False, may_have_base: bool = True) -> SplitMeasures:
    """Return the metrics of a split: those of the evaluation, with intervals where rows have values of their own.

    Args:
        results: The results of its rows.
        is_plain_text: Whether the model continues texts, whose perplexity is a metric.
        may_have_base: Whether there is a base model to compare with.
    """
    blocks = Blocks(len(results.result))
    estimates = estimates_of(results.result, blocks, is_plain_text=is_plain_text)
    base = {} if results.base is None else estimates_of(results.base, blocks, is_plain_text=is_plain_text)
    values, base_values = recorded(results.result), {} if results.base is None else recorded(results.base)
    rights, base_rights = right_rows(results.result), {} if results.base is None else right_rows(results.base)
    names = [name for name in dict.fromkeys((*values, *estimates)) if name.rpartition(".")[2] not in COUNTS]
    names.sort(key=lambda name: name.partition("/")[0] == "loss")  # the metrics of outputs first
    measures = []
    for name in names:
        if name in rights:  # resamples of rows that are all right would have no width
            result, other = share_of(rights[name]), share_of(base_rights[name]) if name in base_rights else None
            difference = None if other is None else difference_of_shares(base_rights[name], rights[name])
        else:
            result = interval_of(estimates[name]) if name in estimates else only_value(values[name])
            other = interval_of(base[name]) if name in base else None
            if other is None and name in base_values:
                other = only_value(base_values[name])
            both = [one[name] for one in (base, estimates) if name in one and math.isfinite(one[name][0])]
            difference = difference_of(*both) if len(both) == 2 else None
        measures.append(Measure(name, result, other, difference))
    return SplitMeasures(results.split, len(results.result), measures, may_have_base)


def right_rows(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return which rows are right, by the name of the metric that is their share, each [N]."""
    rights = {}
    for name, column in evaluation.outputs.items():
        if column.type != "score" and np.isfinite(rights_N := column.rights_N).all():
            rights[f"{name}.{'accuracy' if column.type == 'category' else 'exact_match'}"] = rights_N
    if len(evaluation.outputs) > 1 and len(rights) == len(evaluation.outputs):
        rights["exact_match"] = evaluation.all_right_N
    return rights


def share_of(rights_N: np.ndarray) -> Interval:
    """Return the share of right rows."""
    return share_interval(int(rights_N.sum()), len(rights_N))


def difference_of_shares(base_N: np.ndarray, result_N: np.ndarray) -> Difference:
    """Return the difference of the shares of right rows: result minus base."""
    only_base, only_result = int((base_N > result_N).sum()), int((result_N > base_N).sum())
    return right_difference(only_base, only_result, len(result_N))


def lower_is_better(name: str) -> bool:
    """Return whether lower values of a metric are better."""
    return name in TEXT_METRICS or direction_of(name) == "lower"


def recorded(evaluation: Evaluation) -> Mapping[str, float]:
    """Return the metrics that the evaluation recorded."""
    metrics = evaluation.header.metrics
    known = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    if len(evaluation.outputs) == 1:
        known.pop("exact_match", None)  # it is that of the only output
    return known


def only_value(value: float) -> Interval:
    """Return a metric without an interval."""
    return Interval(value, math.nan, math.nan)


def as_number(name: str, value: float | None) -> str:
    """Format a metric: counts as integers, other values with up to four digits; empty without a value."""
    if not isinstance(value, int | float) or math.isnan(value):
        return ""
    if name.rpartition(".")[2] in COUNTS:
        return f"{value:,.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.4g}"
    return f"{value:.3f}" if abs(value) >= 0.001 or not value else f"{value:.1e}"
