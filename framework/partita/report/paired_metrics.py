"""Differences of the metrics of two models on the same rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from partita.report.compared_rows import EPISODE
from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.resampling import Blocks, Estimates, difference_of, ratio
from partita.report.row_metrics import estimates_of
from partita.report.statistics import right_difference
from partita_schema.sections.outputs import OUTPUT_MODELS, direction_of

METRICS_OF_TYPE = {get_args(model.model_fields["type"].annotation)[0]: tuple(model.METRICS) for model in OUTPUT_MODELS}
"""Names of metrics by type of output."""
MAX_ROUGE_ROWS = 5_000
"""Rows up to which ROUGE is computed, which takes a millisecond for a long text."""
SUCCESS = "success"


@dataclass(frozen=True)
class MetricDifference:
    """A metric of two runs on the same rows."""

    metric: str
    """Name of the metric, such as `team.accuracy`."""
    first: float
    """Value of the reference run."""
    second: float
    """Value of the other run."""
    difference: float
    """Second minus first."""
    low: float
    """Lower end of the 95 % confidence interval of the difference."""
    high: float
    """Upper end of the interval."""
    p: float
    """Two-sided p-value of no difference."""
    test: str
    """`McNemar` for right and wrong rows, else `bootstrap`."""

    @property
    def verdict(self) -> str:
        """Whether the second run is better, worse, or not measurably different."""
        if self.p >= 0.05:
            return "no measurable difference"
        direction = direction_of(self.metric)
        if direction is None:
            return "higher" if self.difference > 0 else "lower"
        return "better" if (self.difference > 0) == (direction == "higher") else "worse"

    def __str__(self) -> str:
        """Return the values, the difference with its interval, the p-value, and the verdict."""
        p = "below 0.001" if self.p < 0.001 else f"{self.p:.3f}"
        values = f"{self.metric} {self.second:.4g} against {self.first:.4g}"
        interval = f"95 % interval {self.low:+.4g} to {self.high:+.4g}"
        return f"{values} (difference {self.difference:+.4g}, {interval}, p {p}): {self.verdict}"


@dataclass(frozen=True)
class Agreement:
    """Number of rows that two runs have right."""

    output: str
    """Name of the output."""
    both: int
    """Rows that both runs have right."""
    only_first: int
    """Rows that only the reference run has right."""
    only_second: int
    """Rows that only the other run has right."""
    neither: int
    """Rows that no run has right."""


def differences_of(first: Evaluation, second: Evaluation) -> list[MetricDifference]:
    """Return the differences of all metrics that two evaluations of the same rows have."""
    blocks = Blocks(len(first))
    before, after = (all_estimates(evaluation, blocks) for evaluation in (first, second))
    fill_invalid(before, after)
    fill_invalid(after, before)
    rights = {name: (first.outputs[name].rights_N, second.outputs[name].rights_N) for name in first.outputs}
    tested = {f"{name}.{metric}": rights[name] for name in rights for metric in ("accuracy", "exact_match")}
    tested |= {SUCCESS: rights[EPISODE]} if EPISODE in rights else {}
    tested |= {"exact_match": (first.all_right_N, second.all_right_N)}
    found = []
    for name in (name for name in before if name in after):
        mine, other = float(before[name][0]), float(after[name][0])
        counts = agreement_of(*tested[name]) if name in tested else None
        if counts is not None:
            result = right_difference(counts[1], counts[2], len(first))
        else:
            result = difference_of(before[name], after[name])
        if math.isfinite(mine) and math.isfinite(other):
            test = "bootstrap" if counts is None else "McNemar"
            found.append(MetricDifference(name, mine, other, result.value, result.low, result.high, result.p, test))
    return found


def fill_invalid(estimates: Estimates, other: Estimates) -> None:
    """Add the share of unreadable answers, 0, of outputs of which only the other run has any."""
    for name in other:
        output, _, metric = name.rpartition(".")
        if metric == "invalid" and any(known.startswith(f"{output}.") for known in estimates):
            estimates.setdefault(name, np.zeros_like(other[name]))


def all_estimates(evaluation: Evaluation, blocks: Blocks) -> Estimates:
    """Return the metrics of an evaluation, those of several outputs together first.

    Args:
        evaluation: The results.
        blocks: Resamples of its rows.
    """
    if EPISODE in evaluation.outputs:
        return episode_estimates(evaluation.outputs[EPISODE], blocks)
    estimates = estimates_of(evaluation, blocks)
    for name, column in evaluation.outputs.items():
        is_missing = column.type == "text" and f"{name}.rouge_l" not in estimates  # too long for the report
        if is_missing and len(column.values) <= MAX_ROUGE_ROWS and any(column.values):
            estimates[f"{name}.rouge_l"] = rouge_estimates(column, blocks)
    known = {name: values for name, values in estimates.items() if is_metric(name, evaluation.header.outputs)}
    first = [name for name in known if name == "exact_match"]
    return {name: known[name] for name in (*first, *(name for name in known if name not in first))}


def is_metric(name: str, outputs: Mapping[str, str]) -> bool:
    """Return whether a metric of an output is one of its type, as the share of right scores is not."""
    output, _, metric = name.rpartition(".")
    return output not in outputs or metric in (*METRICS_OF_TYPE.get(outputs[output], ()), "invalid")


def episode_estimates(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the share of successful episodes, and means of their numbers over the episodes that have them."""
    estimates = {}
    rights_N = column.rights_N
    if np.isfinite(rights_N).all():
        estimates[SUCCESS] = blocks.sums(rights_N)[:, 0] / blocks.sums(np.ones(blocks.rows))[:, 0]
    for name in dict.fromkeys(name for numbers in column.values for name in numbers):
        values_N = np.array([numbers.get(name, math.nan) for numbers in column.values], dtype=np.float64)
        known_N = np.isfinite(values_N)
        sums_R2 = blocks.sums(np.where(known_N, values_N, 0.0), known_N.astype(np.float64))
        estimates[name] = ratio(sums_R2[:, 0], sums_R2[:, 1])
    return estimates


def rouge_estimates(column: OutputColumn, blocks: Blocks) -> np.ndarray:
    """Return ROUGE-L as the metrics of texts compute it."""
    from partita.outputs.text import TextMetrics

    scorer = TextMetrics().rouge_scorer
    pairs = zip(column.references, column.values, strict=True)
    scores = [scorer.score(str(truth).strip(), str(value or ""))["rougeL"].fmeasure for truth, value in pairs]
    sums_R2 = blocks.sums(np.array(scores), np.ones(blocks.rows))
    return ratio(sums_R2[:, 0], sums_R2[:, 1])


def agreement_of(first_N: np.ndarray, second_N: np.ndarray) -> tuple[int, int, int, int] | None:
    """Return how many rows both runs, only the first, only the second, and neither has right.

    None if rows are neither right nor wrong.
    """
    if not np.isfinite(first_N).all() or not np.isfinite(second_N).all():
        return None
    first_N, second_N = first_N > 0, second_N > 0
    groups = (first_N & second_N, first_N & ~second_N, ~first_N & second_N, ~first_N & ~second_N)
    both, only_first, only_second, neither = (int(group.sum()) for group in groups)
    return both, only_first, only_second, neither
