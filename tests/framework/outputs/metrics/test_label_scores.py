import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.metrics.label_scores import LabelScores


def of_one_label(scores: Sequence[float], truths: Sequence[bool]) -> dict[str, float]:
    """Return the metrics of a label with these scores."""
    label_scores = LabelScores()
    for score, truth in zip(scores, truths, strict=True):
        label_scores.add({"x"} if truth else set(), {"x": score})
    return label_scores.by_label()["x"]


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    """Positive rows -1 and -3, negative rows -2 and -4: three of four pairs are right."""
    result = of_one_label([-1.0, -2.0, -3.0, -4.0], [True, False, True, False])
    assert result == {"auroc": 3 / 4, "average_precision": (1 / 1 + 2 / 3) / 2}


def test_equal_scores_count_half() -> None:
    result = of_one_label([-1.0, -1.0, -2.0, -2.0], [True, False, True, False])
    assert result["auroc"] == (1 / 2 + 1 + 0 + 1 / 2) / 4
    assert result["average_precision"] == (1 / 2 + 2 / 4) / 2


@given(st.lists(st.tuples(st.integers(-3, 0), st.booleans()), min_size=2, max_size=20))
def test_both_metrics_equal_scikit_learns_with_ties(rows: list[tuple[int, bool]]) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    scores, truths = [float(score) for score, _ in rows], [truth for _, truth in rows]
    result = of_one_label(scores, truths)
    if not any(truths):
        assert math.isnan(result["average_precision"])
    else:
        assert result["average_precision"] == pytest.approx(average_precision_score(truths, scores))
    if len(set(truths)) < 2:
        assert math.isnan(result["auroc"])
    else:
        assert result["auroc"] == pytest.approx(roc_auc_score(truths, scores))


def test_probabilities_very_close_to_one_are_told_apart() -> None:
    """In single precision, both probabilities would be 1; their logarithms differ."""
    probabilities = [1 - 1e-9, 1 - 1e-12]
    result = of_one_label([math.log(probability) for probability in probabilities], [False, True])
    assert result["auroc"] == 1


def test_a_row_without_scores_has_the_lowest_score() -> None:
    scores = LabelScores()
    scores.add({"x"}, None)
    scores.add({"x"}, {"x": -1.0, "y": -math.inf})
    scores.add({"y"}, {"x": -9.0, "y": -0.5})
    table = scores.by_label()
    assert table["x"] == {"auroc": 1 / 2, "average_precision": (1 / 1 + 2 / 3) / 2}
    assert table["y"] == {"auroc": 1.0, "average_precision": 1.0}


def test_a_label_without_positive_rows_is_not_part_of_the_means() -> None:
    scores = LabelScores()
    scores.add({"x"}, {"x": -1.0, "y": -2.0, "z": -3.0})
    scores.add({"y"}, {"x": -2.0, "y": -1.0, "z": -3.0})
    table = scores.by_label()
    assert math.isnan(table["z"]["auroc"])
    assert scores.means(table) == {"auroc": 1.0, "average_precision": 1.0}


def test_without_any_scores_the_means_are_undefined() -> None:
    scores = LabelScores()
    scores.add({"x"}, None)
    means = scores.means(scores.by_label())
    assert math.isnan(means["auroc"])
    assert math.isnan(means["average_precision"])


def test_the_means_over_labels_equal_scikit_learns_for_sets() -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    dice = random.Random(1)
    labels = ["a", "b", "c", "d"]
    truths = [[dice.random() < 0.4 for _ in labels] for _ in range(80)]
    logs = [[-abs(dice.gauss(0 if one else 1, 1)) for one in row] for row in truths]
    scores = LabelScores()
    for row, of_row in zip(truths, logs, strict=True):
        true_labels = {label for label, one in zip(labels, row, strict=True) if one}
        scores.add(true_labels, dict(zip(labels, of_row, strict=True)))
    means = scores.means(scores.by_label())
    assert means["auroc"] == pytest.approx(roc_auc_score(truths, logs, average="macro"))
    assert means["average_precision"] == pytest.approx(average_precision_score(truths, logs, average="macro"))
