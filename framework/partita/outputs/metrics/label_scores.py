"""Metrics of label scores, one label against all others: area under the ROC curve and average precision.

Shapes: R rows, L labels, S different scores.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.outputs.base import exact_sum
from partita.outputs.metrics.label_counts import LabelCounts, LabelTable

MIN_LOG_PROBABILITY = -1e30
"""Replaces minus infinity, which has no difference to itself."""


class LabelScores:
    """Accumulates the log probabilities of labels, in single precision: four bytes for each row and label.

    Logarithms resolve probabilities near 0 and near 1. Equal scores are ties and share their rank. A row without scores
    has the lowest score of every label.
    """

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ()
        self.scores = array("f")
        self.truths = bytearray()
        self.without_scores = 0
        self.true_without_scores: Counter[str] = Counter()

    def add(self, truth: Collection[str], scores: Mapping[str, float] | None) -> None:
        """Add a row.

        Args:
            truth: Labels of the reference.
            scores: Log probability of each label; None if the row has none.
        """
        if scores is None:
            self.without_scores += 1
            self.true_without_scores.update(truth)
            return
        self.labels = self.labels or tuple(scores)
        self.scores.extend(max(scores[label], MIN_LOG_PROBABILITY) for label in self.labels)
        self.truths.extend(label in truth for label in self.labels)

    def by_label(self) -> LabelTable:
        """Return `auroc` and `average_precision` of each label; NaN where they are undefined."""
        shape = (-1, max(1, len(self.labels)))
        scores_RL = np.frombuffer(self.scores, dtype=np.float32).reshape(shape)
        truths_RL = np.frombuffer(self.truths, dtype=np.bool_).reshape(shape)
        return {
            label: self._counts(label, scores_RL[:, index], truths_RL[:, index]).metrics()
            for index, label in enumerate(self.labels)
        }

    def means(self, table: LabelTable) -> dict[str, float]:
        """Return the means of `by_label` over the labels where the metric is defined; NaN without any."""
        return {name: _mean([row[name] for row in table.values()]) for name in METRICS}

    def _counts(self, label: str, scores_R: npt.NDArray[np.float32], truths_R: npt.NDArray[np.bool_]) -> "ScoreCounts":
        true = self.true_without_scores[label]
        return ScoreCounts.of(scores_R, truths_R, lowest=(true, self.without_scores - true))


@dataclass(frozen=True)
class ScoreCounts:
    """Positive and negative rows by score, the highest score first."""

    positives_S: npt.NDArray[np.int64]
    negatives_S: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, scores_R: npt.NDArray[np.float32], truths_R: npt.NDArray[np.bool_], *, lowest: tuple[int, int] = (0, 0)
    ) -> "ScoreCounts":
        """Count the rows by score.

        Args:
            scores_R: Score of each row.
            truths_R: Whether each row is positive.
            lowest: Numbers of further positive and negative rows, which have the lowest score.
        """
        values, indices_R = np.unique(-scores_R, return_inverse=True)
        all_S = np.bincount(indices_R, minlength=len(values)).astype(np.int64)
        positives_S = np.bincount(indices_R, weights=truths_R, minlength=len(values)).astype(np.int64)
        return cls(np.append(positives_S, lowest[0]), np.append(all_S - positives_S, lowest[1]))

    def metrics(self) -> dict[str, float]:
        """Return both metrics by name."""
        return {name: compute(self) for name, compute in METRICS.items()}

    def auroc(self) -> float:
        """Return the probability that a positive row has a higher score than a negative one; NaN without either.

        Ties count half. It equals the area under the ROC curve (Hanley and McNeil 1982).
        """
        positives, negatives = int(self.positives_S.sum()), int(self.negatives_S.sum())
        if not positives or not negatives:
            return math.nan
        below_S = negatives - self.negatives_S.cumsum()
        return int((self.positives_S * (2 * below_S + self.negatives_S)).sum()) / (2 * positives * negatives)

    def average_precision(self) -> float:
        """Return the mean over positive rows of the precision among all rows with at least their score.

        NaN without positive rows. It equals scikit-learn's `average_precision_score`, which does not interpolate.
        """
        positives = int(self.positives_S.sum())
        if not positives:
            return math.nan
        true_S, all_S = self.positives_S.cumsum(), (self.positives_S + self.negatives_S).cumsum()
        hits = self.positives_S > 0
        return exact_sum((self.positives_S[hits] * (true_S[hits] / all_S[hits])).tolist()) / positives


METRICS: Mapping[str, Callable[[ScoreCounts], float]] = {
    "auroc": ScoreCounts.auroc,
    "average_precision": ScoreCounts.average_precision,
}


def _mean(values: Collection[float]) -> float:
    """Return the mean of the values that are not NaN."""
    defined = [value for value in values if not math.isnan(value)]
    return exact_sum(defined) / len(defined) if defined else math.nan


def label_table(counts: LabelCounts, scores: LabelScores | None) -> LabelTable:
    """Return the metrics of each label, with those of its scores if labels are scored."""
    scored = {} if scores is None else scores.by_label()
    return {label: row | scored.get(label, {}) for label, row in counts.table().items()}
