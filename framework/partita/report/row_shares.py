"""Metrics that are the share of some rows: which rows count, by the name of the metric."""

from collections.abc import Mapping

import numpy as np

from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.preference_rows import preference_shares

EPISODE = "episode"
"""Name and type of the output of a simulated dialogue, whose value is its numbers by name."""
SUCCESS = "success"


def shares_of(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return which rows count, 1 or 0, by the name of the metric that is their share, each [N]."""
    shares, evaluation = preference_shares(evaluation), evaluation.expected()
    is_answered_N = np.array([answer is not None for answer in evaluation.answers], dtype=bool)
    for name, column in evaluation.outputs.items():
        rights_N = column.rights_N
        is_judged = bool(len(rights_N)) and bool(np.isfinite(rights_N).all())
        if column.type == EPISODE:
            shares |= {SUCCESS: rights_N} if is_judged else {}
            continue
        if is_judged and column.type != "score":  # a score is not right or wrong
            shares[f"{name}.{'accuracy' if column.type == 'category' else 'exact_match'}"] = rights_N
        if is_judged or len(column.values) > column.values.count(None):
            shares |= {f"{name}.{metric}": rows_N for metric, rows_N in readable_rows(column, is_answered_N).items()}
    all_right_N = evaluation.all_right_N
    if len(evaluation.outputs) > 1 and np.isfinite(all_right_N).all():
        shares["exact_match"] = all_right_N
    return shares


def readable_rows(column: OutputColumn, is_answered_N: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the rows that are unreadable (`invalid`), have no answer (`errors`), or for JSON are readable (`valid`).

    Args:
        column: An output.
        is_answered_N: Whether the model has answered each row.
    """
    is_missing_N = np.array([value is None for value in column.values], dtype=bool) & ~np.array(
        column.nulls, dtype=bool
    )
    invalid_N, errors_N = is_missing_N & is_answered_N, is_missing_N & ~is_answered_N
    rows = {"invalid": invalid_N, "errors": errors_N}
    if column.type == "json":
        rows["valid"] = ~is_missing_N
        if all(isinstance(reference, dict) for reference in column.references):
            rows["joint_accuracy"] = column.rights_N == 1
    return {name: rows_N.astype(np.float64) for name, rows_N in rows.items()}
