"""Metrics from the results of rows, by output type: the same values as `partita.outputs`, and their resamples.

Shares of right rows are in `row_shares`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from partita.outputs.types.entities import OUTSIDE, entities
from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.label_curves import curve_metrics
from partita.report.preference_rows import preference_estimates
from partita.report.resampling import Blocks, Estimates, ratio
from partita.report.row_shares import EPISODE
from partita.report.value_metrics import (
    RANKING_METRICS,
    embedding_metrics,
    episode_metrics,
    json_metrics,
    number_metrics,
    rankings_of,
    score_metrics,
    text_metrics,
)

MAX_LABELS = 300
"""Labels up to which their metrics are resampled."""
MAX_EXPONENT = 700.0


def estimates_of(evaluation: Evaluation, blocks: Blocks, *, is_plain_text: bool = False) -> Estimates:
    """Return the metrics of an evaluation by name, as in the run's metrics, without shares of rows.

    Args:
        evaluation: The results.
        blocks: Resamples of its rows.
        is_plain_text: Whether the model continues texts, whose perplexity is a metric.
    """
    estimates = preference_estimates(evaluation, blocks)
    expected = evaluation.expected()
    of_expected = blocks if expected is evaluation else Blocks(len(expected))
    for name, column in expected.outputs.items():
        known = METRICS[column.type](column, of_expected) if column.type in METRICS and has_values(column) else {}
        if column.type in ("category", "set") and has_all_scores(evaluation, name):
            known |= curve_metrics(column.scores, labels_of(column), blocks)
        estimates |= {metric if column.type == EPISODE else f"{name}.{metric}": known[metric] for metric in known}
    losses_N, tokens_N = evaluation.losses_N, evaluation.tokens_N
    known_N = np.isfinite(losses_N)
    if known_N.any():
        sums_R2 = blocks.sums(np.where(known_N, losses_N * tokens_N, 0.0), np.where(known_N, tokens_N, 0.0))
        estimates["loss"] = ratio(sums_R2[:, 0], sums_R2[:, 1])
        if is_plain_text:
            estimates["perplexity"] = np.exp(np.minimum(estimates["loss"], MAX_EXPONENT))
    return estimates


def num_resampled(evaluation: Evaluation) -> dict[str, int]:
    """Return how many queries are resampled for the metrics of rankings, by name; all others are over rows."""
    return {
        f"{name}.{metric}": len(rankings_of(column))
        for name, column in evaluation.expected().outputs.items()
        if column.type == "score"
        for metric in RANKING_METRICS
    }


def has_values(column: OutputColumn) -> bool:
    """Return whether any row has a value, or contributes to metrics in another way."""
    return any(len(values) > values.count(None) for values in (column.of_rows, column.rights, column.values))


def has_all_scores(evaluation: Evaluation, name: str) -> bool:
    """Return whether the results hold the scores of all labels."""
    labels, scores = evaluation.header.num_labels.get(name, 0), evaluation.outputs[name].scores
    return labels > 0 and all(row is None or len(row) == labels for row in scores)


def labels_of(column: OutputColumn) -> list[Sequence[str]]:
    """Return the labels of each reference."""
    if column.type == "category":
        return [(str(reference),) for reference in column.references]
    return [reference or () for reference in column.references]


def category_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return macro and weighted F1; see `partita.outputs.types.category.CategoryMetrics`."""
    codes: dict[str, int] = {}
    truths_N = np.array([codes.setdefault(str(one), len(codes)) for one in column.references])
    answers_N = np.array([-1 if one is None else codes.setdefault(str(one), len(codes)) for one in column.values])
    if len(codes) > MAX_LABELS:
        return {}
    rows_N, readable_N, shared_N = np.arange(blocks.rows), answers_N >= 0, answers_N == truths_N
    true_RL = blocks.counts(rows_N, truths_N, len(codes))
    answered_RL = blocks.counts(rows_N[readable_N], answers_N[readable_N], len(codes))
    f1_RL = ratio(2 * blocks.counts(rows_N[shared_N], truths_N[shared_N], len(codes)), true_RL + answered_RL)
    weighted_R = ratio(np.nansum(f1_RL * true_RL, axis=1), true_RL.sum(axis=1))
    return {"macro_f1": means(f1_RL), "weighted_f1": weighted_R}


def set_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of sets of labels; see `partita.outputs.types.set.SetMetrics`."""
    truths = [sorted(set(reference or ())) for reference in column.references]
    answers = [sorted(set(value or ())) for value in column.values]
    shares = [
        1.0 if right else len(set(truth) & set(answer)) / max(1, len(set(truth) | set(answer)))
        for truth, answer, right in zip(truths, answers, column.rights, strict=True)
    ]
    metrics = f1_metrics(truths, answers, blocks) | {"jaccard": blocks.means(np.array(shares))}
    return {name: metrics[name] for name in metrics if name not in ("micro_precision", "micro_recall")}


def tags_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of tags and their entities; see `partita.outputs.types.tags.TagsMetrics`."""
    truths, answers, words = [], [], []
    for truth, value in zip(column.references, column.values, strict=True):
        tags = [*(value or ()), *[OUTSIDE] * (len(truth) - len(value or ()))][: len(truth)]
        truths.append(entities(truth))
        answers.append(entities(tags))
        words.append((len(truth), 0 if value is None else sum(map(str.__eq__, tags, truth))))
    words_R2 = blocks.sums(*np.array(words, dtype=np.float64).T)
    accuracy = {"word_accuracy": ratio(words_R2[:, 1], words_R2[:, 0])}
    return f1_metrics(truths, answers, blocks, label=lambda entity: entity.type) | accuracy


def f1_metrics(
    truths: Sequence[Sequence[Any]],
    answers: Sequence[Sequence[Any]],
    blocks: Blocks,
    *,
    label: Callable[[Any], str] = str,
) -> Estimates:
    """Return precision, recall and F1 of all labels together, and the mean F1 of labels.

    Args:
        truths: The reference of each row.
        answers: The answer of each row.
        blocks: Resamples of the rows.
        label: Returns the label of a member of a reference or answer.
    """
    counts = label_counts(truths, answers, blocks, label=label)
    if counts is None:
        return {}
    true_RL, answered_RL, shared_RL = counts
    true_R, answered_R, shared_R = (counts_RL.sum(axis=1) for counts_RL in counts)
    return {
        "micro_precision": np.nan_to_num(ratio(shared_R, answered_R)),
        "micro_recall": np.nan_to_num(ratio(shared_R, true_R)),
        "micro_f1": ratio(2 * shared_R, true_R + answered_R),
        "macro_f1": means(ratio(2 * shared_RL, true_RL + answered_RL)),
    }


def label_counts(
    truths: Sequence[Sequence[Any]],
    answers: Sequence[Sequence[Any]],
    blocks: Blocks,
    *,
    label: Callable[[Any], str] = str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return how often each label is true, answered and both, each [R + 1, L]; None with no or too many labels.

    Args:
        truths: The reference of each row.
        answers: The answer of each row.
        blocks: Resamples of the rows.
        label: Returns the label of a member of a reference or answer.
    """
    shared = [[one for one in answer if one in truth] for truth, answer in zip(truths, answers, strict=True)]
    codes: dict[str, int] = {}
    found = [occurrences(group, codes, label) for group in (truths, answers, shared)]
    if not 0 < len(codes) <= MAX_LABELS:
        return None
    true, answered, both = (blocks.counts(rows_M, codes_M, len(codes)) for rows_M, codes_M in found)
    return true, answered, both


def occurrences(
    groups: Iterable[Sequence[Any]], codes: dict[str, int], label: Callable[[Any], str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the code of each label; new labels get the next code."""
    rows, found = [], []
    for row, group in enumerate(groups):
        for one in group:
            rows.append(row)
            found.append(codes.setdefault(label(one), len(codes)))
    return np.array(rows, dtype=np.int64), np.array(found, dtype=np.int64)


def means(values_RL: np.ndarray) -> np.ndarray:
    """Return the mean over the labels that occur; NaN without any."""
    known_RL = np.isfinite(values_RL)
    return ratio(np.where(known_RL, values_RL, 0.0).sum(axis=1), known_RL.sum(axis=1).astype(np.float64))


METRICS: dict[str, Callable[[OutputColumn, Blocks], Estimates]] = {
    "category": category_metrics,
    "embedding": embedding_metrics,
    EPISODE: episode_metrics,
    "json": json_metrics,
    "number": number_metrics,
    "preference": text_metrics,
    "score": score_metrics,
    "set": set_metrics,
    "tags": tags_metrics,
    "text": text_metrics,
}
"""By type of output."""
