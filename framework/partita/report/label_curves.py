"""Area under the ROC curve and average precision of label scores, resampled over rows.

Of up to MAX_BLOCKS rows, the metrics of each resample are exact. Of more rows, scores are grouped by the quantiles of
the positive and of the negative rows, which changes the metrics by less than a hundredth of their interval; the
difference at all rows is added to all resamples.

Shapes: N rows, L labels, R resamples, S different scores.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from partita.outputs.metrics.label_scores import MIN_LOG_PROBABILITY, ScoreCounts
from partita.report.resampling import MAX_BLOCKS, Blocks, Estimates, ratio

QUANTILES = 64
"""Quantiles of the positive, and of the negative rows, that scores are grouped by."""


def curve_metrics(
    scores: Sequence[Mapping[str, float | None] | None], truths: Sequence[Collection[str]], blocks: Blocks
) -> Estimates:
    """Return `auroc` and `average_precision`, means over labels; see `partita.outputs.metrics.label_scores`.

    Args:
        scores: Log probability of each label, of each row; None if the row has none. All rows have the same labels.
        truths: Labels of the reference of each row.
        blocks: Resamples of the rows.
    """
    labels = next((list(row) for row in scores if row), [])
    # Single precision, as in the metrics of the evaluation, so that the same scores are ties.
    table_NL = np.array([[low_if_missing(row, label) for label in labels] for row in scores], dtype=np.float32)
    resampled: dict[str, list[np.ndarray]] = {"auroc": [], "average_precision": []}
    for index, label in enumerate(labels):
        is_positive_N = np.array([label in truth for truth in truths])
        counts = resampled_counts(table_NL[:, index], is_positive_N, blocks)
        exact = ScoreCounts.of(table_NL[:, index], is_positive_N).metrics()
        for name, values_R in (("auroc", auroc(*counts)), ("average_precision", average_precision(*counts))):
            resampled[name].append(values_R + (exact[name] - values_R[0]))
    with np.errstate(invalid="ignore"):
        return {name: mean_of_known(np.stack(values_LR)) for name, values_LR in resampled.items() if values_LR}


def low_if_missing(row: Mapping[str, float | None] | None, label: str) -> float:
    """Return the score of a label; the lowest one for a row without scores."""
    score = None if row is None else row.get(label)
    return MIN_LOG_PROBABILITY if score is None else score


def resampled_counts(scores_N: np.ndarray, is_positive_N: np.ndarray, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of positive and negative rows of each resample by score, the highest first, each [R + 1, S].

    Args:
        scores_N: Score of each row.
        is_positive_N: Whether each row is positive.
        blocks: Resamples of the rows.
    """
    if blocks.rows > MAX_BLOCKS:
        groups_N = groups_of(scores_N, is_positive_N)
        codes_N = 2 * groups_N + is_positive_N
        counts_RS2 = blocks.counts(np.arange(len(codes_N)), codes_N, 2 * int(groups_N.max() + 1))
        return counts_RS2[:, 1::2], counts_RS2[:, ::2]
    order_N = np.argsort(-scores_N, kind="stable")
    ordered_N = scores_N[order_N]
    starts_S = np.flatnonzero(np.append(True, ordered_N[1:] != ordered_N[:-1]))
    drawn_RN = blocks.draws_RB[:, blocks.blocks_N[order_N]]
    positive_RN = drawn_RN * is_positive_N[order_N]
    all_RS, positive_RS = (np.add.reduceat(values, starts_S, axis=1) for values in (drawn_RN, positive_RN))
    return positive_RS, all_RS - positive_RS


def groups_of(scores_N: np.ndarray, is_positive_N: np.ndarray) -> np.ndarray:
    """Return the group of each score, 0 for the highest ones."""
    shares = np.linspace(0, 1, QUANTILES + 1)[1:-1]
    halves = [half for half in (scores_N[is_positive_N], scores_N[~is_positive_N]) if len(half)]
    limits = np.unique(np.concatenate([np.quantile(half, shares) for half in halves]))
    return np.asarray(len(limits) - np.searchsorted(limits, scores_N, side="right"))


def auroc(positive_RS: np.ndarray, negative_RS: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve of each resample, [R + 1]; NaN without positive or negative rows."""
    positive_R, negative_R = positive_RS.sum(axis=1), negative_RS.sum(axis=1)
    below_RS = negative_R[:, None] - negative_RS.cumsum(axis=1)
    return ratio((positive_RS * (below_RS + negative_RS / 2)).sum(axis=1), positive_R * negative_R)


def average_precision(positive_RS: np.ndarray, negative_RS: np.ndarray) -> np.ndarray:
    """Return the average precision of each resample, [R + 1]; NaN without positive rows."""
    true_RS = positive_RS.cumsum(axis=1)
    precision_RS = true_RS / np.maximum(1, true_RS + negative_RS.cumsum(axis=1))
    return ratio((positive_RS * precision_RS).sum(axis=1), positive_RS.sum(axis=1))


def mean_of_known(values_LR: np.ndarray) -> np.ndarray:
    """Return the mean over the labels whose metric is defined, [R + 1]; NaN without any."""
    known_LR = np.isfinite(values_LR)
    return ratio(np.where(known_LR, values_LR, 0.0).sum(axis=0), known_LR.sum(axis=0))
