"""Categories: the confusion matrix, and how far probabilities agree with the share of right answers."""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from partita.report.charts import Chart, Curve, curve_chart, matrix_chart
from partita.report.evaluation import OutputColumn
from partita.report.section import Charts, NamedTable, Part
from partita.report.sections.labels import category_rows

MAX_LABELS = 12
"""Labels of a confusion matrix; the others are together in one row and column."""
OTHERS = "(others)"
UNREADABLE = "(none)"
"""Column of answers without a readable label."""
BINS = 10
"""Bins of the calibration chart."""


def category_parts(column: OutputColumn) -> list[Part]:
    """Return the confusion matrix, the calibration if labels have scores, and the metrics of each label."""
    pairs = Counter(
        (str(reference), None if value is None else str(value))
        for reference, value in zip(column.references, column.values, strict=True)
    )
    charts = [confusion_chart(pairs), *calibration_chart(column)]
    table = category_rows(pairs)
    return [Charts(charts), *([NamedTable("By label", table, folded=len(table.rows) > MAX_LABELS)] if table else [])]


def confusion_chart(answers: Mapping[tuple[str, str | None], int]) -> Chart:
    """Return the confusion matrix, of the most frequent labels if there are many.

    Args:
        answers: Number of rows of each pair of a reference and an answer.
    """
    frequency: Counter[str] = Counter()
    for (reference, value), count in answers.items():
        frequency[reference] += count
        frequency.update({} if value is None else {value: 0})
    labels = [label for label, _ in frequency.most_common()]
    shown = sorted(labels) if len(labels) <= MAX_LABELS else sorted(labels[: MAX_LABELS - 1])
    rest = [OTHERS] if len(shown) < len(labels) else []
    rows = [*shown, *rest]
    columns = [*rows, *([UNREADABLE] if any(value is None for _, value in answers) else [])]
    places: dict[str | None, int] = {label: index for index, label in enumerate(shown)}
    places[None] = len(rows)  # not by its title, which may also be a label
    counts_RC = np.zeros((len(rows), len(columns)))
    right_others = 0
    for (reference, value), count in answers.items():
        row, answer = places.get(reference, len(rows) - 1), places.get(value, len(rows) - 1)
        counts_RC[row, answer] += count
        right_others += count if reference == value and reference not in shown else 0
    note = ""
    if rest:
        wrong = int(counts_RC[len(rows) - 1, len(rows) - 1]) - right_others
        note = (
            f"The {len(shown)} most frequent of {len(labels):,} labels; {OTHERS} stands for the rest, which are taken "
            f"for each other in {wrong:,} rows."
        )
    return matrix_chart(
        "Confusion matrix", counts_RC, rows=rows, columns=columns, row_label="correct", column_label="answer", note=note
    )


def calibration_chart(column: OutputColumn) -> list[Chart]:
    """Return the share of right answers by probability (Guo et al. 2017); none without scores."""
    confidences_N, rights_N = confidences(column)
    if not len(confidences_N):
        return []
    bins_N = np.minimum((confidences_N * BINS).astype(int), BINS - 1)
    counts_B = np.bincount(bins_N, minlength=BINS)
    used_B = counts_B > 0
    mean_B = np.bincount(bins_N, weights=confidences_N, minlength=BINS)[used_B] / counts_B[used_B]
    right_B = np.bincount(bins_N, weights=rights_N, minlength=BINS)[used_B] / counts_B[used_B]
    error = float(np.sum(counts_B[used_B] * np.abs(mean_B - right_B)) / len(confidences_N))
    curves = [Curve("right answers", mean_B, right_B, dots=True), Curve("perfect", [0.0, 1.0], [0.0, 1.0])]
    note = (
        f"Expected calibration error {error:.3f}, over {BINS} bins of equal width. Below the dashed line, the model is "
        "more certain than it is right."
    )
    return [curve_chart("Calibration", curves, x_label="probability of the answer", y_label="share right", note=note)]


def confidences(column: OutputColumn) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the most probable label and whether it is right, for each row with scores."""
    pairs = [
        (*most_probable(scores), str(reference))
        for scores, reference in zip(column.scores, column.references, strict=False)
        if scores
    ]
    probabilities = [min(1.0, math.exp(score)) for _, score, _ in pairs]
    return np.array(probabilities), np.array([float(label == reference) for label, _, reference in pairs])


def most_probable(scores: Mapping[str, float]) -> tuple[str, float]:
    """Return the most probable label and its log probability."""
    label = max(scores, key=scores.__getitem__)
    return label, scores[label]
