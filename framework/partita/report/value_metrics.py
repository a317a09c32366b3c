"""Metrics of numbers, scores, embeddings, texts, JSON values and dialogues from the results of rows, with resamples.

Shapes: N rows, R resamples, Q queries, M entries of all rows, F fields, S slots, C counts of a text, O orders of
n-grams.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.outputs.metrics.ranking import Document, normalized_gain, reciprocal_rank
from partita.outputs.types.json import MAX_FIELDS, SlotPath, canonical, slots_of
from partita.outputs.types.text import ROUGE
from partita.report.evaluation import OutputColumn
from partita.report.resampling import Blocks, Estimates, ratio

ROUNDING = 1e-12
"""Variance of references, as a share of that of all rows, up to which they are taken as equal."""
PRECISION = 1e-15
"""Standard deviation of references, as a share of their mean, up to which they are taken as equal."""
DEPTHS = (1, 5, 10)
"""Ranks that the recall of embeddings is reported for."""
RANKING_METRICS = {"mrr": reciprocal_rank, "ndcg_at_10": normalized_gain}
"""Metrics of the documents of a query, of which the mean over queries is a metric of scores."""
ORDERS = 4
"""Lengths of the n-grams of BLEU."""


@np.errstate(over="ignore", invalid="ignore")  # errors near the largest float have an infinite mean
def number_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of numbers; see `partita.outputs.types.number.NumberMetrics`."""
    truths_N, values_N = numbers_of(column)
    valid_N = np.isfinite(truths_N) & np.isfinite(values_N)
    if not valid_N.any():
        return {}
    center = truths_N[valid_N].mean()
    errors_N = np.where(valid_N, values_N - truths_N, 0.0)
    centered_N = np.where(valid_N, truths_N - center, 0.0)
    sums_R5 = blocks.sums(valid_N.astype(np.float64), np.abs(errors_N), errors_N**2, centered_N, centered_N**2)
    count, absolute, squares, truth, truth_squares = sums_R5.T
    mse_R, variance_R = ratio(squares, count), ratio(truth_squares, count) - ratio(truth, count) ** 2
    variance_R[variance_R <= ROUNDING * variance_R[0] + (PRECISION * center) ** 2] = 0.0  # what rounding has left
    r2_R = 1 - ratio(mse_R, variance_R)
    if not variance_R[0]:
        r2_R[0] = 0.0 if mse_R[0] else 1.0
    return {"mae": ratio(absolute, count), "mse": mse_R, "rmse": np.sqrt(mse_R), "r2": r2_R}


def numbers_of(column: OutputColumn) -> tuple[np.ndarray, np.ndarray]:
    """Return references and values as numbers, each [N]; NaN where there is none."""

    def number(value: Any) -> float:
        return float(value) if isinstance(value, int | float) else math.nan

    return np.array(list(map(number, column.references))), np.array(list(map(number, column.values)))


def score_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the error of scores over rows, and the metrics of rankings over queries.

    See `partita.outputs.types.score.ScoreMetrics`.
    """
    metrics = {name: values for name, values in number_metrics(column, blocks).items() if name == "mse"}
    rankings = rankings_of(column)
    if not rankings:
        return metrics
    queries_blocks = Blocks(len(rankings))
    ranks = {name: np.array(list(map(measure, rankings))) for name, measure in RANKING_METRICS.items()}
    return {name: queries_blocks.means(values_Q) for name, values_Q in ranks.items()} | metrics


def rankings_of(column: OutputColumn) -> list[list[Document]]:
    """Return the documents of each query that has a relevant one, the best first; empty if some row has no query."""
    queries: dict[str, list[Document]] = {}
    for reference, value, of_row in zip(column.references, column.values, column.of_rows, strict=False):
        if of_row is None or reference is None:
            return []
        queries.setdefault(of_row["query"], []).append((-math.inf if value is None else value, reference))
    return [
        sorted(documents, reverse=True)
        for documents in queries.values()
        if any(relevance > 0 for _, relevance in documents)
    ]


def embedding_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of the ranks of positives, over rows; see `partita_trainers.objectives.contrastive`."""
    ranks = [of_row["rank"] for of_row in column.of_rows if of_row is not None]
    if len(ranks) < blocks.rows:
        return {}
    ranks_N = np.array(ranks, dtype=np.float64)
    recall = {f"recall_at_{depth}": blocks.means((ranks_N <= depth).astype(np.float64)) for depth in DEPTHS}
    return {"mrr": blocks.means(1 / ranks_N)} | recall


def json_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the metrics of JSON values; see `partita.outputs.types.json.JsonMetrics`."""
    objects = [isinstance(truth, dict) for truth in column.references]
    fields: dict[str, list[tuple[int, bool]]] = {}
    wanted, answered, shared = [], [], []
    for row, (truth, value) in enumerate(zip(column.references, column.values, strict=True)):
        truth = truth if objects[row] else {}
        answer = value if isinstance(value, dict) else {}
        for name, one in truth.items():
            right = name in answer and canonical(answer[name]) == canonical(one)
            fields.setdefault(name, []).append((row, right))
        wanted.append(slots_of(truth))
        answered.append(slots_of(answer if objects[row] else {}))
        shared.append([path for path, content in wanted[-1].items() if answered[-1].get(path) == content])
    metrics = field_metrics(fields, blocks) | slot_metrics(wanted, answered, shared, objects, blocks)
    if not all(objects) and any(objects):
        sums_R2 = blocks.sums(np.array(objects, dtype=np.float64), (column.rights_N == 1) & np.array(objects))
        metrics["joint_accuracy"] = ratio(sums_R2[:, 1], sums_R2[:, 0])
    return {name: values for name, values in metrics.items() if np.isfinite(values[0])}


def field_metrics(fields: dict[str, list[tuple[int, bool]]], blocks: Blocks) -> Estimates:
    """Return the accuracy of all fields together, and of each one up to MAX_FIELDS.

    Args:
        fields: By name, the rows that have the field, and whether it is right there.
        blocks: Resamples of the rows.
    """
    if not fields:
        return {}
    codes = {name: min(code, MAX_FIELDS) for code, name in enumerate(fields)}  # the last code is that of all others
    rows_M3 = np.array([(row, codes[name], right) for name in fields for row, right in fields[name]])
    all_RF = blocks.counts(rows_M3[:, 0], rows_M3[:, 1], MAX_FIELDS + 1)
    right_M = rows_M3[rows_M3[:, 2] == 1]
    right_RF = blocks.counts(right_M[:, 0], right_M[:, 1], MAX_FIELDS + 1)
    by_name = {
        f"field.{name}": ratio(right_RF[:, code], all_RF[:, code]) for name, code in codes.items() if code < MAX_FIELDS
    }
    return {"field_accuracy": ratio(right_RF.sum(axis=1), all_RF.sum(axis=1)), **by_name}


def slot_metrics(
    wanted: Sequence[dict[SlotPath, str]],
    answered: Sequence[dict[SlotPath, str]],
    shared: Sequence[Sequence[SlotPath]],
    objects: Sequence[bool],
    blocks: Blocks,
) -> Estimates:
    """Return the metrics of slots; see `partita.outputs.types.json.SlotMetrics`.

    Args:
        wanted: Slots of each reference.
        answered: Slots of each answer.
        shared: Slots of each answer that are right.
        objects: Whether each reference is an object.
        blocks: Resamples of the rows.
    """
    slots = sorted({path for row in wanted for path in row})
    if not slots:
        return {}
    codes = {path: code for code, path in enumerate(slots)}
    true_RS, answered_RS, shared_RS = (counts_of(rows, codes, blocks) for rows in (wanted, answered, shared))
    wrong = [
        [path for path in (*row, *(one for one in answer if one not in row)) if path not in right]
        for row, answer, right in zip(wanted, answered, map(set, shared), strict=True)
    ]
    wrong_RS, sizes_R = counts_of(wrong, codes, blocks), blocks.sums(np.array(objects, dtype=np.float64))[:, 0]
    total_R = true_RS.sum(axis=1) + answered_RS.sum(axis=1)
    by_slot = {
        f"slot.{'.'.join(path)}": ratio(2 * shared_RS[:, code], true_RS[:, code] + answered_RS[:, code])
        for path, code in list(codes.items())[:MAX_FIELDS]
    }
    return {
        "slot_accuracy": 1 - ratio(wrong_RS[:, : len(slots)].sum(axis=1), sizes_R * len(slots)),
        "slot_f1": ratio(2 * shared_RS.sum(axis=1), total_R),
        **by_slot,
    }


def counts_of(
    rows: Sequence[Sequence[SlotPath] | dict[SlotPath, str]], codes: dict[SlotPath, int], blocks: Blocks
) -> np.ndarray:
    """Return how often each slot occurs in each resample, [R + 1, S + 1]; the last column has slots without a code."""
    places = [(row, codes.get(path, len(codes))) for row, paths in enumerate(rows) for path in paths]
    places_M2 = np.array(places, dtype=np.int64).reshape(-1, 2)
    return blocks.counts(places_M2[:, 0], places_M2[:, 1], len(codes) + 1)


def text_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return ROUGE and BLEU of texts; see `partita.outputs.types.text.TextMetrics`."""
    rows = [of_row for of_row in column.of_rows if of_row is not None and "bleu" in of_row]
    if len(rows) < blocks.rows or not rows:
        return {}
    rouge = {name: blocks.means(np.array([row[name] for row in rows])) for name in ROUGE}
    return rouge | {"bleu": bleu(blocks.sums(*np.array([row["bleu"] for row in rows], dtype=np.float64).T))}


def bleu(sums_RC: np.ndarray) -> np.ndarray:
    """Return BLEU from its counts: matches and totals by order, and the lengths of answers and references, [R + 1].

    The value is that of `compute_bleu` of sacrebleu with `smooth_method="exp"` and `effective_order`.
    """
    matches_RO, totals_RO = sums_RC[:, :ORDERS], sums_RC[:, ORDERS : 2 * ORDERS]
    answer_R, truth_R = sums_RC[:, 2 * ORDERS], sums_RC[:, 2 * ORDERS + 1]
    penalty_R = np.where(answer_R > 0, np.exp(np.minimum(0.0, 1 - truth_R / np.maximum(1, answer_R))), 0.0)
    is_used_RO = np.cumprod(totals_RO > 0, axis=1).astype(bool)  # up to the first order without n-grams
    is_missing_RO = (matches_RO == 0) & is_used_RO
    smoothed_RO = np.where(is_missing_RO, 0.5 ** is_missing_RO.cumsum(axis=1), matches_RO)
    logs_RO = np.log(np.where(is_used_RO, 100 * smoothed_RO / np.maximum(1, totals_RO), 1.0))
    score_R = penalty_R * np.exp(logs_RO.sum(axis=1) / np.maximum(1, is_used_RO.sum(axis=1)))
    return np.where(matches_RO.any(axis=1), np.minimum(100.0, score_R), 0.0)


def episode_metrics(column: OutputColumn, blocks: Blocks) -> Estimates:
    """Return the means of the numbers of dialogues, over the dialogues that have them."""
    estimates = {}
    for name in dict.fromkeys(name for numbers in column.values for name in numbers):
        values_N = np.array([numbers.get(name, math.nan) for numbers in column.values], dtype=np.float64)
        known_N = np.isfinite(values_N)
        sums_R2 = blocks.sums(np.where(known_N, values_N, 0.0), known_N.astype(np.float64))
        estimates[name] = ratio(sums_R2[:, 0], sums_R2[:, 1])
    return estimates
