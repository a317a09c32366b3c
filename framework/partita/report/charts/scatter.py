"""Charts of pairs of values."""

import numpy as np

from partita.report.charts.axes import BOTTOM, LEFT, RIGHT, TOP, axis_of, frame
from partita.report.charts.chart import HEIGHT, MAX_TABLE_ROWS, WIDTH, Chart, Table, svg

MAX_DOTS = 400
"""Dots of a scatter plot."""


def scatter_chart(title: str, xs: np.ndarray, ys: np.ndarray, *, x_label: str, y_label: str, note: str = "") -> Chart:
    """Return a chart of pairs with the line where both are equal; of many pairs, evenly chosen ones are drawn.

    Args:
        title: What it shows.
        xs: Values along the horizontal axis, [N].
        ys: Values along the vertical axis, [N].
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
        note: A sentence below the chart.
    """
    finite = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[finite], ys[finite]
    chosen = np.linspace(0, max(0, len(xs) - 1), min(MAX_DOTS, len(xs))).round().astype(int)
    some_xs, some_ys = xs[chosen], ys[chosen]
    values = [*some_xs.tolist(), *some_ys.tolist()]
    x_axis = axis_of(values, start=LEFT, end=WIDTH - RIGHT)
    y_axis = axis_of(values, start=HEIGHT - BOTTOM, end=TOP + 8)
    parts = frame(x_axis, y_axis, x_label=x_label, y_label=y_label)
    parts.append(f'<line class="mark" x1="{x_axis.start}" y1="{y_axis.start}" x2="{x_axis.end}" y2="{y_axis.end}"/>')
    parts += [
        f'<circle cx="{x_axis.position(x):.1f}" cy="{y_axis.position(y):.1f}" r="2" fill="var(--c0)" opacity=".6"/>'
        for x, y in zip(some_xs.tolist(), some_ys.tolist(), strict=True)
    ]
    rows = [[f"{x:,.5g}", f"{y:,.5g}"] for x, y in zip(some_xs[:MAX_TABLE_ROWS], some_ys[:MAX_TABLE_ROWS], strict=True)]
    return Chart(title, svg(title, parts), Table([x_label, y_label], rows), note)
