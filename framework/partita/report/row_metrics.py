"""Metrics from the results of rows, by output type: the same values as `partita.outputs`, and their resamples."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from partita.outputs.entities import OUTSIDE, entities
from partita.outputs.json import canonical, slots_of
from partita.outputs.text import ROUGE, TextMetrics
from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.resampling import Blocks, Estimates, ratio

MAX_LABELS = 300
"""Labels up to which their metrics are resampled."""
MAX_ROUGE_CELLS = 1_000_000
"""Pairs of words of references and answers up to which ROUGE is computed, about a second."""
MAX_EXPONENT = 700.0
ROUNDING = 1e-12
"""Variance of references, as a share of that of all rows, up to which they are taken as equal."""


def estimates_of(evaluation: Evaluation, blocks: Blocks, *, is_plain_text: bool = False) -> dict[str, np.ndarray]:
    """Return the metrics of an evaluation by name, as in the run's metrics.

    Args:
        evaluation: The results.
        blocks: Resamples of its rows.
        is_plain_text: Whether the model continues texts, whose perplexity is a metric.
    """
    estimates: dict[str, np.ndarray] = {}
    for name, column in evaluation.outputs.items():
        if any(right is not None for right in column.rights) or any(value is not None for value in column.values):
            known = METRICS.get(column.type, exact_metrics)(column, blocks)
            estimates |= {f"{name}.{metric}": values for metric, values in known.items()}
    if len(evaluation.outputs) > 1 and np.isfinite(all_right_N := evaluation.all_right_N).all():
        estimates["exact_match"] = blocks.sums(all_right_N)[:, 0] / blocks.rows
    losses_N, tokens_N = evaluation.losses_N, evaluation.tokens_N
    known_N = np.isfinite(losses_N)
    if known_N.any():
        sums_R2 = blocks.sums(np.where(known_N, losses_N * tokens_N, 0.0), np.where(known_N, tokens_N, 0.0))
        estimates["loss"] = ratio(sums_R2[:, 0], sums_R2[:, 1])
        if is_plain_text:
            estimates["perplexity"] = np.exp(np.minimum(estimates["loss"], MAX_EXPONENT))
    return estimates


def exact_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the share of right values, and of unreadable or missing ones."""
    rights_N = column.rights_N
    missing_N = np.array([value is None for value in column.values], dtype=np.float64)
    sums_R2 = blocks.sums(rights_N, missing_N)
    metrics = {"exact_match": sums_R2[:, 0] / sums_of_rows(blocks)} if np.isfinite(rights_N).all() else {}
    return metrics | ({"invalid": sums_R2[:, 1] / sums_of_rows(blocks)} if missing_N.any() else {})


def sums_of_rows(blocks: Blocks) -> np.ndarray:
    """Return the number of rows of each resample, which differs where blocks have different numbers of rows."""
    return blocks.sums(np.ones(blocks.rows))[:, 0]


def category_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return accuracy, macro and weighted F1; see `partita.outputs.category.CategoryMetrics`."""
    codes: dict[str, int] = {}
    truths_N = np.array([codes.setdefault(str(one), len(codes)) for one in column.references])
    answers_N = np.array([-1 if one is None else codes.setdefault(str(one), len(codes)) for one in column.values])
    exact, rows_N = dict(exact_metrics(column, blocks)), np.arange(blocks.rows)
    metrics = {"accuracy": exact.pop("exact_match")} if "exact_match" in exact else {}
    if len(codes) <= MAX_LABELS:
        readable_N, shared_N = answers_N >= 0, answers_N == truths_N
        true_RL = blocks.counts(rows_N, truths_N, len(codes))
        answered_RL = blocks.counts(rows_N[readable_N], answers_N[readable_N], len(codes))
        f1_RL = ratio(2 * blocks.counts(rows_N[shared_N], truths_N[shared_N], len(codes)), true_RL + answered_RL)
        metrics["macro_f1"] = means(f1_RL)
        metrics["weighted_f1"] = ratio(np.nansum(f1_RL * true_RL, axis=1), true_RL.sum(axis=1))
    return metrics | exact


def set_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of sets of labels; see `partita.outputs.set.SetMetrics`."""
    truths = [sorted(set(reference or ())) for reference in column.references]
    answers = [sorted(set(value or ())) for value in column.values]
    shares_N = [
        1.0 if right else len(set(truth) & set(answer)) / max(1, len(set(truth) | set(answer)))
        for truth, answer, right in zip(truths, answers, column.rights, strict=True)
    ]
    jaccard_R = blocks.sums(np.array(shares_N))[:, 0] / sums_of_rows(blocks)
    return f1_metrics(truths, answers, blocks) | {"jaccard": jaccard_R} | exact_metrics(column, blocks)


def tags_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of tags and their entities; see `partita.outputs.tags.TagsMetrics`."""
    truths, answers, words = [], [], []
    for truth, value in zip(column.references, column.values, strict=True):
        tags = [*(value or ()), *[OUTSIDE] * (len(truth) - len(value or ()))][: len(truth)]
        truths.append(entities(truth))
        answers.append(entities(tags))
        words.append((len(truth), 0 if value is None else sum(map(str.__eq__, tags, truth))))
    words_R2 = blocks.sums(*np.array(words, dtype=np.float64).T)
    accuracy = {"word_accuracy": ratio(words_R2[:, 1], words_R2[:, 0])}
    return (
        f1_metrics(truths, answers, blocks, label=lambda entity: entity.type) | accuracy | exact_metrics(column, blocks)
    )


def f1_metrics(
    truths: Sequence[Sequence[Any]],
    answers: Sequence[Sequence[Any]],
    blocks: Blocks,
    *,
    label: Callable[[Any], str] = str,
) -> dict[str, np.ndarray]:
    """Return micro and macro F1 of labels.

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
    micro_R = ratio(2 * shared_RL.sum(axis=1), (true_RL + answered_RL).sum(axis=1))
    return {"micro_f1": micro_R, "macro_f1": means(ratio(2 * shared_RL, true_RL + answered_RL))}


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


@np.errstate(over="ignore", invalid="ignore")  # errors near the largest float have an infinite mean
def number_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of numbers; see `partita.outputs.number.NumberMetrics`."""
    truths_N, values_N = numbers_of(column)
    valid_N = np.isfinite(truths_N) & np.isfinite(values_N)
    if not valid_N.any():
        return exact_metrics(column, blocks)
    center = truths_N[valid_N].mean()
    errors_N = np.where(valid_N, values_N - truths_N, 0.0)
    centered_N = np.where(valid_N, truths_N - center, 0.0)
    sums_R5 = blocks.sums(valid_N.astype(np.float64), np.abs(errors_N), errors_N**2, centered_N, centered_N**2)
    count, absolute, squares, truth, truth_squares = sums_R5.T
    mse_R, variance_R = ratio(squares, count), ratio(truth_squares, count) - ratio(truth, count) ** 2
    variance_R[variance_R <= ROUNDING * variance_R[0] + (ROUNDING * center) ** 2] = 0.0  # what rounding has left
    r2_R = 1 - ratio(mse_R, variance_R)
    if not variance_R[0]:
        r2_R[0] = 0.0 if mse_R[0] else 1.0
    return {
        "mae": ratio(absolute, count),
        "mse": mse_R,
        "rmse": np.sqrt(mse_R),
        "r2": r2_R,
        **exact_metrics(column, blocks),
    }


def score_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the mean squared error of scores; their rankings need the queries, which row results do not hold."""
    return {name: values for name, values in number_metrics(column, blocks).items() if name == "mse"}


def numbers_of(column: OutputColumn) -> tuple[np.ndarray, np.ndarray]:
    """Return references and values as numbers, each [N]; NaN where there is none."""

    def number(value: Any) -> float:
        return float(value) if isinstance(value, int | float) else math.nan

    return np.array(list(map(number, column.references))), np.array(list(map(number, column.values)))


def json_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of JSON values; see `partita.outputs.json.JsonMetrics`."""
    sums = []
    for truth, value in zip(column.references, column.values, strict=True):
        wanted = truth if isinstance(truth, dict) else {}
        answer = value if isinstance(value, dict) else {}
        fields = sum(name in answer and canonical(answer[name]) == canonical(one) for name, one in wanted.items())
        slots, answered = slots_of(wanted), slots_of(answer if wanted else {})
        shared = sum(answered.get(path) == content for path, content in slots.items())
        sums.append((len(wanted), fields, len(slots) + len(answered), 2 * shared))
    fields_R, right_R, slots_R, shared_R = blocks.sums(*np.array(sums, dtype=np.float64).T).T
    metrics = {"field_accuracy": ratio(right_R, fields_R), "slot_f1": ratio(shared_R, slots_R)}
    return exact_metrics(column, blocks) | {name: values for name, values in metrics.items() if np.isfinite(values[0])}


def text_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of texts except BLEU; see `partita.outputs.text.TextMetrics`. ROUGE only of short texts."""
    pairs = [
        (str(truth).strip(), str(value or "")) for truth, value in zip(column.references, column.values, strict=True)
    ]
    if sum(len(truth.split()) * len(value.split()) for truth, value in pairs) > MAX_ROUGE_CELLS:
        return exact_metrics(column, blocks)
    scorer = TextMetrics().rouge_scorer
    scores = [scorer.score(truth, value) for truth, value in pairs]
    rouge = {name: np.array([score[kind].fmeasure for score in scores]) for name, kind in ROUGE.items()}
    means_R = {name: blocks.sums(values_N)[:, 0] / sums_of_rows(blocks) for name, values_N in rouge.items()}
    return exact_metrics(column, blocks) | means_R


METRICS: dict[str, Callable[[OutputColumn, Blocks], Estimates]] = {
    "category": category_metrics,
    "json": json_metrics,
    "number": number_metrics,
    "score": score_metrics,
    "set": set_metrics,
    "tags": tags_metrics,
    "text": text_metrics,
}
"""By output type; other types have `exact_metrics`."""
