"""Sets of labels and tags of words: the metrics of each label."""

from collections.abc import Mapping, Sequence
from typing import Any

from partita.outputs.metrics.label_counts import LabelCounts
from partita.outputs.types.entities import OUTSIDE, entities
from partita.report.charts import Table
from partita.report.evaluation import OutputColumn
from partita.report.section import NamedTable, Part

MAX_ROWS = 100
"""Labels of a table; of more, those with the lowest F1."""


def set_parts(column: OutputColumn) -> list[Part]:
    """Return the metrics of each label of sets."""
    truths = [sorted(set(reference or ())) for reference in column.references]
    answers = [sorted(set(value or ())) for value in column.values]
    shared = [sorted(set(truth) & set(answer)) for truth, answer in zip(truths, answers, strict=True)]
    return table_of(label_rows(truths, answers, shared), "By label")


def tags_parts(column: OutputColumn) -> list[Part]:
    """Return the metrics of each type of entity."""
    truths, answers, shared = [], [], []
    for truth, value in zip(column.references, column.values, strict=True):
        tags = [*(value or ()), *[OUTSIDE] * len(truth)][: len(truth)]
        wanted, found = entities(truth), entities(tags)
        truths.append([entity.type for entity in wanted])
        answers.append([entity.type for entity in found])
        shared.append([entity.type for entity in set(wanted) & set(found)])
    return table_of(label_rows(truths, answers, shared), "By type of entity")


def table_of(table: Table | None, caption: str) -> list[Part]:
    """Return a table with a caption; nothing without a table."""
    return [NamedTable(caption, table)] if table is not None else []


def category_rows(pairs: Mapping[tuple[str, str | None], int]) -> Table | None:
    """Return precision, recall and F1 of each label.

    Args:
        pairs: Number of rows of each pair of a reference and an answer.
    """
    counts = LabelCounts()
    for (reference, answer), rows in pairs.items():
        counts.true[reference] += rows
        if answer is not None:
            counts.answered[answer] += rows
            counts.shared[reference] += rows * (answer == reference)
    return label_table(counts)


def label_rows(
    truths: Sequence[Sequence[Any]], answers: Sequence[Sequence[Any]], shared: Sequence[Sequence[Any]]
) -> Table | None:
    """Return precision, recall and F1 of each label.

    Args:
        truths: The labels of each reference.
        answers: The labels of each answer.
        shared: The labels of each answer that are right.
    """
    counts = LabelCounts()
    for truth, answer, both in zip(truths, answers, shared, strict=True):
        counts.add(truth, answer, both)
    return label_table(counts)


def label_table(counts: LabelCounts) -> Table | None:
    """Return a row for each label, those with the lowest F1 if there are many; None without labels."""
    metrics = counts.table()
    labels = list(metrics)
    if len(labels) > MAX_ROWS:
        labels = sorted(labels, key=lambda label: (metrics[label]["f1"], label))[:MAX_ROWS]
    rows = [
        [
            label,
            *(f"{metrics[label][name]:.3f}" for name in ("precision", "recall", "f1")),
            f"{metrics[label]['support']:,.0f}",
        ]
        for label in labels
    ]
    return Table(["label", "precision", "recall", "F1", "rows"], rows) if rows else None
