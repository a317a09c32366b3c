"""The metrics of labels as tables for a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

MAX_LABELS = 20
"""Labels in a table."""
MAX_ERRORS = 10
"""Pairs of a correct label and an answer in a table."""
UNREADABLE = "(none)"
"""Shown for an answer without a label."""


def label_table(output: str, per_label: Mapping[str, Mapping[str, float]]) -> Table | None:
    """Return a table with a row per label, or with those of lowest F1 if there are many; None without labels.

    Args:
        output: Name of the output.
        per_label: Metrics by label.
    """
    if not per_label:
        return None
    labels, title = list(per_label), f"{output}: labels"
    if len(labels) > MAX_LABELS:
        labels = sorted(labels, key=lambda label: (per_label[label]["f1"], label))[:MAX_LABELS]
        title = f"{output}: {MAX_LABELS} of {len(per_label):,} labels, lowest F1 first (all with --json)"
    table = Table(title=title, title_justify="left")
    table.add_column("label", overflow="fold")
    metrics = list(dict.fromkeys(name for row in per_label.values() for name in row))
    for metric in metrics:
        table.add_column(metric.replace("_", "\n"), justify="right", overflow="fold")
    for label in labels:
        table.add_row(label, *(format_value(name, per_label[label].get(name)) for name in metrics))
    return table


def error_table(output: str, confusion: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return a table of the most frequent pairs of a correct label and another answer; None without errors.

    Args:
        output: Name of the output.
        confusion: Pairs with the keys `correct`, `answer` and `rows`.
    """
    errors = sorted((pair for pair in confusion if pair["correct"] != pair["answer"]), key=lambda pair: -pair["rows"])
    if not errors:
        return None
    title = f"{output}: errors"
    if len(errors) > MAX_ERRORS:
        title = f"{output}: {MAX_ERRORS} of {len(errors):,} errors, most frequent first (all with --json)"
    table = Table(title=title, title_justify="left")
    for column in ("correct", "answer"):
        table.add_column(column, overflow="fold")
    table.add_column("rows", justify="right")
    for pair in errors[:MAX_ERRORS]:
        answer = UNREADABLE if pair["answer"] is None else pair["answer"]
        table.add_row(pair["correct"], answer, f"{pair['rows']:,}")
    return table


def format_value(name: str, value: float | None) -> str:
    """Format a cell: a number of rows as an integer, other values with three decimals; empty if undefined."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if name == "support" else f"{value:.3f}"
