"""Precision, recall and F1 of labels, from counts."""

import math
from collections import Counter
from collections.abc import Iterable

LabelTable = dict[str, dict[str, float]]
"""Metrics of each label: `precision`, `recall`, `f1` and `support`, the number of times that the label is correct."""


class LabelCounts:
    """Counts of labels in references and answers.

    A quotient without anything to count is 0, as in scikit-learn.
    """

    def __init__(self) -> None:
        self.true: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.shared: Counter[str] = Counter()

    def add(self, truth: Iterable[str], answer: Iterable[str], shared: Iterable[str]) -> None:
        """Add a row.

        Args:
            truth: Labels of the reference.
            answer: Labels of the answer.
            shared: Labels of the answer that are right.
        """
        self.true.update(truth)
        self.answered.update(answer)
        self.shared.update(shared)

    @property
    def labels(self) -> list[str]:
        """The labels that occur as reference or answer, sorted."""
        return sorted(self.true.keys() | self.answered.keys())

    def f1(self, label: str) -> float:
        """Return the F1 score of a label."""
        return 2 * self.shared[label] / (self.true[label] + self.answered[label])

    def macro_f1(self) -> float | None:
        """Return the mean of the labels' F1 scores; None without labels."""
        labels = self.labels
        return math.fsum(map(self.f1, labels)) / len(labels) if labels else None

    def micro(self) -> dict[str, float] | None:
        """Return precision, recall and F1 of all labels together; None without labels."""
        true, answered, shared = self.true.total(), self.answered.total(), self.shared.total()
        return _scores(true, answered, shared) if true + answered else None

    def weighted_f1(self) -> float:
        """Return the mean of the labels' F1 scores, weighted by their number of references, of which there is one."""
        return math.fsum(count * self.f1(label) for label, count in self.true.items()) / self.true.total()

    def table(self) -> LabelTable:
        """Return the metrics of each label."""
        return {
            label: _scores(self.true[label], self.answered[label], self.shared[label])
            | {"support": float(self.true[label])}
            for label in self.labels
        }


def _scores(true: int, answered: int, shared: int) -> dict[str, float]:
    """Return precision, recall and F1 of counts, of which `true` or `answered` is positive."""
    return {
        "precision": shared / answered if answered else 0.0,
        "recall": shared / true if true else 0.0,
        "f1": 2 * shared / (true + answered),
    }
