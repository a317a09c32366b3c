"""Metrics with their intervals, of one model or beside those of another one on the same rows, and the verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from partita.report.evaluation import Evaluation, SplitResults
from partita.report.number_text import is_count
from partita.report.resampling import Blocks, difference_of, interval_of
from partita.report.row_metrics import estimates_of, num_resampled
from partita.report.row_shares import shares_of
from partita.report.statistics import Difference, Interval, has_interval, right_difference, share_interval
from partita.runs.listing import find_metric
from partita_schema.sections.objectives import DOCUMENT_METRICS
from partita_schema.sections.outputs import direction_of

SIGNIFICANCE = 0.05
"""A difference is measurable if its p-value is below."""
READABLE = ("invalid", "errors", "valid")
"""Metrics of whether answers can be read."""
Verdict = Literal["better", "worse", "higher", "lower", "no measurable difference"]


@dataclass(frozen=True)
class MetricEstimate:
    """A metric of a model, and of a reference on the same rows: the base model, or another run."""

    metric: str
    """Name of the metric, such as `team.accuracy`."""
    result: Interval
    """Value of the model, with its 95 % confidence interval; the ends are NaN where there is none."""
    reference: Interval | None = None
    """Value of the reference; None without one."""
    difference: Difference | None = None
    """The model minus the reference; None without a reference, or if the rows do not determine the metric."""

    @property
    def has_interval(self) -> bool:
        """Whether the metric has an interval that says something about other rows."""
        return has_interval(self.result)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the model is better or worse than the reference; None if that is not known.

        A difference is measurable if its p-value is below 0.05. `higher` and `lower` are verdicts on metrics that do
        not measure quality.
        """
        if self.difference is None:
            return None
        if self.difference.p >= SIGNIFICANCE:
            return "no measurable difference"
        is_higher = self.difference.value > 0
        if not lower_is_better(self.metric) and direction_of(self.metric) is None:
            return "higher" if is_higher else "lower"
        return "better" if is_higher != lower_is_better(self.metric) else "worse"

    def __str__(self) -> str:
        """Return the values, the difference with its interval, the p-value, and the verdict."""
        if self.reference is None or self.difference is None:
            return f"{self.metric} {self.result.value:.4g}"
        difference = self.difference
        p = "below 0.001" if difference.p < 0.001 else f"{difference.p:.3f}"
        values = f"{self.metric} {self.result.value:.4g} against {self.reference.value:.4g}"
        has_width = has_interval(difference)
        interval = f", 95 % interval {difference.low:+.4g} to {difference.high:+.4g}" if has_width else ""
        return f"{values} (difference {difference.value:+.4g}{interval}, p {p}): {self.verdict}"

    def record(self) -> dict[str, Any]:
        """Return the metric as a flat JSON-compatible dictionary; `first` is the reference, `second` the model."""
        first = None if self.reference is None else self.reference.value
        difference = {} if self.difference is None else self.difference._asdict()
        value = difference.pop("value", None)
        return {"metric": self.metric, "first": first, "second": self.result.value, "difference": value} | difference


def lower_is_better(name: str) -> bool:
    """Return whether lower values of a metric are better."""
    return direction_of(name) == "lower"


@dataclass(frozen=True)
class SplitMeasures:
    """The metrics of a split."""

    split: str
    rows: int
    expected_rows: int
    """Rows that generated answers are compared with; fewer than `rows` if some answers are labelled bad."""
    measures: Sequence[MetricEstimate]
    may_have_base: bool = True
    """Whether there is a base model to compare with: not if the model is new, or is the base model itself."""

    @property
    def has_base(self) -> bool:
        """Whether the base model was evaluated on the same rows."""
        return any(measure.reference is not None for measure in self.measures)


def main_measure(measures: Sequence[MetricEstimate], wanted: Sequence[str]) -> MetricEstimate | None:
    """Return the metric that describes a model best: one of `wanted`, else the first that measures quality.

    Args:
        measures: Its metrics.
        wanted: Names of metrics, the best one first, as from `main_metrics`.
    """
    named = {measure.metric: measure for measure in measures}
    found = [find_metric(name, named) for name in wanted]
    judged = [name for name in named if direction_of(name) and name not in DOCUMENT_METRICS]
    return next((named[name] for name in (*found, *judged, *named) if name in named), None)


def measure_rows(
    result: Evaluation, reference: Evaluation | None = None, *, is_plain_text: bool = False
) -> list[MetricEstimate]:
    """Return the metrics that the results of rows determine, those of outputs first.

    Args:
        result: The results of a model.
        reference: The results of another model for the same rows in the same order.
        is_plain_text: Whether the models continue texts, whose perplexity is a metric.
    """
    models = [result] if reference is None else [result, reference]
    blocks = Blocks(len(result))
    shares = [shares_of(evaluation) for evaluation in models]
    estimates = [estimates_of(evaluation, blocks, is_plain_text=is_plain_text) for evaluation in models]
    measures = [measure_share(name, [one.get(name) for one in shares]) for name in shares[0]]
    units = num_resampled(result)
    measures += [
        measure_estimate(name, [one.get(name) for one in estimates], units=units.get(name, len(result)))
        for name in estimates[0]
    ]
    places = {name: place for place, name in enumerate(result.outputs)}
    return sorted(measures, key=lambda measure: order_of(measure.metric, places))


def order_of(metric: str, places: Mapping[str, int]) -> tuple[int, int]:
    """Return what sorts metrics: all outputs together, by output with unreadable answers last, and the loss.

    Args:
        metric: Name of a metric.
        places: Place of each output.
    """
    output, _, name = metric.partition(".")
    if metric in ("exact_match", "loss", "perplexity"):
        return -1 if metric == "exact_match" else len(places) + 1, 0
    return places.get(output, len(places)), int(name in READABLE)


def measure_share(name: str, rows: Sequence[np.ndarray | None]) -> MetricEstimate:
    """Return a metric that is the share of some rows.

    Args:
        name: Name of the metric.
        rows: Whether each row counts, as 1 or 0, by model, each [N]; None if a model does not have the metric.
    """
    result_N, reference_N = rows[0], rows[1] if len(rows) > 1 else None
    assert result_N is not None
    if reference_N is None:
        return MetricEstimate(name, share_of(result_N))
    only_reference, only_result = int((reference_N > result_N).sum()), int((result_N > reference_N).sum())
    difference = right_difference(only_reference, only_result, len(result_N))
    return MetricEstimate(name, share_of(result_N), share_of(reference_N), difference)


def share_of(rows_N: np.ndarray) -> Interval:
    """Return the share of rows that count."""
    return share_interval(int(rows_N.sum()), len(rows_N))


def measure_estimate(name: str, values: Sequence[np.ndarray | None], *, units: int) -> MetricEstimate:
    """Return a metric that was resampled.

    Args:
        name: Name of the metric.
        values: Its value over all rows and over each resample, by model, each [R + 1]; None if a model does not have
            the metric.
        units: Number of rows, or queries, that are resampled.
    """
    result_R, reference_R = values[0], values[1] if len(values) > 1 else None
    assert result_R is not None
    if reference_R is None:
        return MetricEstimate(name, interval_of(result_R))
    known = math.isfinite(result_R[0]) and math.isfinite(reference_R[0])
    difference = difference_of(reference_R, result_R, units=units) if known else None
    return MetricEstimate(name, interval_of(result_R), interval_of(reference_R), difference)


def measures_of(results: SplitResults, *, is_plain_text: bool = False, may_have_base: bool = True) -> SplitMeasures:
    """Return the metrics of a split: those of the evaluation, with intervals where the rows determine them.

    Args:
        results: The results of its rows.
        is_plain_text: Whether the model continues texts, whose perplexity is a metric.
        may_have_base: Whether there is a base model to compare with.
    """
    values, base = recorded(results.result), {} if results.base is None else recorded(results.base)
    measured = {one.metric: one for one in measure_rows(results.result, results.base, is_plain_text=is_plain_text)}
    names = [name for name in dict.fromkeys((*values, *measured)) if not is_count(name)]
    names.sort(key=lambda name: name.partition("/")[0] == "loss")  # the metrics of outputs first
    measures = [
        measured[name]
        if name in measured
        else MetricEstimate(name, only_value(values[name]), only_value(base[name]) if name in base else None)
        for name in names
    ]
    rows, expected_rows = len(results.result), len(results.result.expected())
    return SplitMeasures(results.split, rows, expected_rows, measures, may_have_base)


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
