"""Charts of counts by two labels, such as a confusion matrix."""

from collections.abc import Sequence
from html import escape
from math import cos, radians

import numpy as np

from partita.report.charts.chart import WIDTH, Chart, Table, fitted, svg

LABEL_WIDTH = 96
"""Width of the labels of rows, and height of those of columns, with the space after them."""
LABEL_SPACE = 6
RIGHT_SPACE = 26
"""Space right of the cells, for the label of the last column."""
SLOPE = 60
"""Slope of the labels of columns in degrees."""
MAX_CELL = 60.0
"""Largest side of a cell."""
MIN_SHARE_CELL = 34.0
"""Smallest side of a cell that also shows its share of the row."""


def matrix_chart(
    title: str,
    counts_RC: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    note: str = "",
) -> Chart:
    """Return a chart of counts, whose cells are shaded by their share of the row.

    Args:
        title: What it shows.
        counts_RC: Counts by row and column.
        rows: Labels of the rows.
        columns: Labels of the columns.
        row_label: What the rows are.
        column_label: What the columns are.
        note: A sentence below the chart.
    """
    side = min(MAX_CELL, (WIDTH - LABEL_WIDTH - RIGHT_SPACE) / max(1, len(columns)))
    shares_RC = counts_RC / np.maximum(1, counts_RC.sum(axis=1, keepdims=True))
    top = LABEL_WIDTH + 4
    parts = [
        f'<text class="quiet" x="0" y="12">{escape(row_label)} \u2193</text>',
        f'<text class="quiet" x="0" y="27">{escape(column_label)} \u2192</text>',
    ]
    for index, label in enumerate(columns):
        x = LABEL_WIDTH + (index + 0.5) * side + 4
        room = min(LABEL_WIDTH - LABEL_SPACE, (WIDTH - x) / cos(radians(SLOPE)) - 2 * LABEL_SPACE)
        name = escape(fitted(label, width=room))
        parts.append(f'<text transform="translate({x:.1f} {top - 5}) rotate(-{SLOPE})">{name}</text>')
    for index, label in enumerate(rows):
        y = top + (index + 0.5) * side
        parts.append(
            f'<text x="{LABEL_WIDTH - LABEL_SPACE}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(fitted(label, width=LABEL_WIDTH - LABEL_SPACE))}</text>"
        )
        for number, column in enumerate(columns):
            hint = f"{row_label} {label}, {column_label} {column}: {counts_RC[index, number]:,.0f}"
            parts.append(
                cell(
                    int(counts_RC[index, number]),
                    float(shares_RC[index, number]),
                    x=LABEL_WIDTH + number * side,
                    y=top + index * side,
                    side=side,
                    hint=hint,
                )
            )
    table = Table(
        [f"{row_label} \\ {column_label}", *columns],
        [[label, *(f"{count:,.0f}" for count in counts)] for label, counts in zip(rows, counts_RC, strict=True)],
    )
    return Chart(title, svg(title, parts, height=top + len(rows) * side + 4), table, note)


def cell(count: int, share: float, *, x: float, y: float, side: float, hint: str) -> str:
    """Return the SVG elements of a cell.

    Args:
        count: Its number.
        share: The number as a share of its row, which decides the shade.
        x: Left end.
        y: Upper end.
        side: Width and height.
        hint: What the number is.
    """
    opacity = 0.05 + 0.55 * share  # the text stays readable on the darkest shade, in light and dark mode
    number = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
    lines = [number, *([f"{share:.0%}"] if side >= MIN_SHARE_CELL else [])] if count else []
    middle, texts = y + side / 2 - 6.5 * (len(lines) - 1), list[str]()
    for index, text in enumerate(lines):
        size = min(11.0, 1.75 * (side - 4) / len(text))
        texts.append(
            f'<text x="{x + side / 2:.1f}" y="{middle + 13 * index + 0.36 * size:.1f}" text-anchor="middle" '
            f'style="font-size:{size:.1f}px">{text}</text>'
        )
    return (
        f'<g><title>{escape(hint)}</title><rect x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{side - 1:.1f}" '
        f'height="{side - 1:.1f}" fill="var(--c0)" fill-opacity="{opacity:.2f}"/>{"".join(texts)}</g>'
    )
