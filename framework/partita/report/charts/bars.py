"""Charts of counts by interval."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from partita.report.charts.axes import BOTTOM, LEFT, RIGHT, TOP, axis_of, frame
from partita.report.charts.chart import HEIGHT, WIDTH, Chart, Table, svg

ROUNDING = 1e-12
"""Difference of values, as a share of the largest one, up to which they are taken as equal."""


def histogram_chart(title: str, values: Sequence[float] | np.ndarray, *, x_label: str, bins: int = 24) -> Chart:
    """Return a histogram of values. A few whole numbers have a bar each.

    Args:
        title: What it shows.
        values: The values, [N].
        x_label: Name and unit of the values.
        bins: Number of intervals of equal width; whole numbers in a smaller range have one each.
    """
    values_N = np.asarray(values, dtype=np.float64)
    low, high = float(values_N.min()), float(values_N.max())
    if high - low < bins and (values_N == np.round(values_N)).all() and low < high:
        wholes = range(int(low), int(high) + 1)
        counts_B = np.bincount((values_N - low).astype(np.int64))
        limits = [*(whole - 0.5 for whole in wholes), high + 0.5]
        return bars_chart(title, counts_B.tolist(), limits, x_label=x_label, names=[f"{whole:,}" for whole in wholes])
    if high - low <= ROUNDING * max(abs(low), abs(high)):  # too close to divide: in the middle of an interval
        margin = abs(high) / 2 or 0.5
        low, high = low - margin, high + margin
    counts, edges = np.histogram(values_N, bins=bins, range=(low, high))
    return bars_chart(title, counts.tolist(), edges.tolist(), x_label=x_label)


def bars_chart(
    title: str, counts: Sequence[float], edges: Sequence[float], *, x_label: str, names: Sequence[str] | None = None
) -> Chart:
    """Return a chart of counts by interval.

    Args:
        title: What it shows.
        counts: Count of each interval, [N].
        edges: Limits of the intervals, [N + 1].
        x_label: Name and unit of the horizontal axis.
        names: Name of each interval in the table, [N]. Default: its limits.
    """
    x_axis = axis_of(list(edges), start=LEFT, end=WIDTH - RIGHT)
    y_axis = axis_of([*counts, 0.0], start=HEIGHT - BOTTOM, end=TOP + 8)
    parts = frame(x_axis, y_axis, x_label=x_label, y_label="rows")
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        left, right = x_axis.position(low), x_axis.position(high)
        top = y_axis.position(count)
        parts.append(
            f'<rect x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(0.5, right - left - 1):.1f}" '
            f'height="{max(0.0, HEIGHT - BOTTOM - top):.1f}" fill="var(--c0)"/>'
        )
    names = names or [f"{low:,.4g} to {high:,.4g}" for low, high in pairwise(edges)]
    rows = [[name, f"{count:,.0f}"] for name, count in zip(names, counts, strict=True)]
    return Chart(title, svg(title, parts), Table([x_label, "rows"], rows))
