"""Charts of curves over a common axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from partita.report.charts.axes import BOTTOM, LEFT, RIGHT, SPACE, TOP, Axis, Scale, axis_of, frame
from partita.report.charts.chart import (
    COLORS,
    DASHES,
    HEIGHT,
    MAX_TABLE_ROWS,
    WIDTH,
    Chart,
    Table,
    fitted,
    svg,
    text_width,
)

KEY_WIDTH = 32
"""Width of the line of a curve in the legend, and of the space around it."""
DOT = 2.4
"""Radius of a dot."""
SECTIONS = 150
"""A curve of more than twice as many values is drawn as mean and range in this many sections."""

SHARES = (0.0, 0.5, 1.0)
"""Values that the axis of shares holds."""


@dataclass(frozen=True)
class Curve:
    """Values along the horizontal axis, in its order."""

    name: str
    xs: Sequence[float] | np.ndarray
    ys: Sequence[float] | np.ndarray
    dots: bool = False
    """Whether each value is drawn as a dot, for curves of few values."""
    line: bool = True
    """Whether the values are joined by a line."""


@dataclass(frozen=True)
class Mark:
    """An event on the horizontal axis."""

    x: float
    text: str


@dataclass(frozen=True)
class ThinCurve:
    """The values of a curve, or means of many values with their range. N points."""

    curve: Curve
    xs_N: np.ndarray
    ys_N: np.ndarray
    lows_N: np.ndarray | None = None
    """Lowest value of each mean; None if all values are shown."""
    highs_N: np.ndarray | None = None
    """Highest value of each mean."""


def thin(curve: Curve, *, positive: bool) -> ThinCurve:
    """Return the finite values of a curve; of many, the mean and the range in each section of the horizontal axis.

    Args:
        curve: The curve.
        positive: Whether to leave out values that are not above 0.
    """
    xs_N, ys_N = np.asarray(curve.xs, dtype=np.float64), np.asarray(curve.ys, dtype=np.float64)
    shown_N = np.isfinite(ys_N) & ((ys_N > 0) if positive else True)
    xs_N, ys_N = xs_N[shown_N], ys_N[shown_N]
    if len(xs_N) <= 2 * SECTIONS:
        return ThinCurve(curve, xs_N, ys_N)
    starts_S = np.linspace(0, len(xs_N), SECTIONS, endpoint=False).astype(np.int64)
    counts_S = np.diff([*starts_S, len(xs_N)])
    return ThinCurve(
        curve,
        np.add.reduceat(xs_N, starts_S) / counts_S,
        np.add.reduceat(ys_N, starts_S) / counts_S,
        np.minimum.reduceat(ys_N, starts_S),
        np.maximum.reduceat(ys_N, starts_S),
    )


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    x_scale: Scale = "linear",
    y_scale: Scale = "linear",
    include: Sequence[float] = (),
    note: str = "",
) -> Chart:
    """Return a chart of curves over a common horizontal axis.

    Args:
        title: What it shows.
        curves: The curves; values that are not finite are left out.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
        marks: Events.
        x_scale: linear or log.
        y_scale: linear or log.
        include: Further values that the vertical axis holds, such as 0.
        note: A sentence below the chart.
    """
    thinned = [thin(curve, positive=y_scale == "log") for curve in curves]
    xs = [value for one in thinned for value in one.xs_N.tolist()]
    ys = [
        value for one in thinned for part in (one.ys_N, one.lows_N, one.highs_N) if part is not None for value in part
    ]
    x_axis = axis_of([*xs, *(mark.x for mark in marks)], start=LEFT, end=WIDTH - RIGHT, scale=x_scale)
    y_axis = axis_of([*ys, *include], start=HEIGHT - BOTTOM, end=TOP + SPACE, scale=y_scale)
    parts = frame(x_axis, y_axis, x_label=x_label, y_label=y_label)
    for mark in marks:
        x = x_axis.position(mark.x)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + SPACE}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(mark.text)}</title></line>"
        )
    for number, one in enumerate(thinned):
        parts += draw_curve(one, number=number, x_axis=x_axis, y_axis=y_axis)
    parts += legend(curves) if len(curves) > 1 else []
    return Chart(title, svg(title, parts), curve_table(thinned, x_label=x_label), note)


def draw_curve(thinned: ThinCurve, *, number: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    """Return the SVG elements of a curve: its range as an area, its line, its dots.

    Args:
        thinned: The curve.
        number: Which curve of the chart it is; chooses color and dashes.
        x_axis: The horizontal axis.
        y_axis: The vertical axis.
    """

    def line(ys_N: np.ndarray) -> list[str]:
        pairs = zip(thinned.xs_N.tolist(), ys_N.tolist(), strict=True)
        return [f"{x_axis.position(x):.1f},{y_axis.position(y):.1f}" for x, y in pairs]

    color, dash, points = f"var(--c{number % COLORS})", DASHES[number % COLORS], line(thinned.ys_N)
    parts = list[str]()
    if thinned.lows_N is not None and thinned.highs_N is not None:
        outline = [*line(thinned.highs_N), *reversed(line(thinned.lows_N))]
        parts.append(f'<polygon fill="{color}" fill-opacity=".22" points="{" ".join(outline)}"/>')
    if len(points) > 1 and thinned.curve.line:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline class="curve" stroke="{color}"{dashes} points="{" ".join(points)}"/>')
    if thinned.curve.dots or not thinned.curve.line or len(points) == 1:
        for point in points:
            x, y = point.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="{DOT}" fill="{color}"/>')
    return parts


def curve_table(thinned: Sequence[ThinCurve], *, x_label: str) -> Table:
    """Return the values of curves at no more than MAX_TABLE_ROWS horizontal values."""
    values = [dict(zip(one.xs_N.tolist(), one.ys_N.tolist(), strict=True)) for one in thinned]
    xs = sorted(set().union(*values))
    chosen = np.unique(np.linspace(0, len(xs) - 1, MAX_TABLE_ROWS).round().astype(int)).tolist() if xs else []
    rows = [
        [f"{xs[index]:,.6g}", *(f"{named[xs[index]]:,.5g}" if xs[index] in named else "" for named in values)]
        for index in chosen
    ]
    return Table([x_label, *(one.curve.name for one in thinned)], rows)


def legend(curves: Sequence[Curve]) -> list[str]:
    """Return the SVG elements of a legend at the top right, below the name of the vertical axis."""
    parts, x = list[str](), float(WIDTH - RIGHT)
    room = x / len(curves) - KEY_WIDTH
    for number, curve in reversed(list(enumerate(curves))):
        name = fitted(curve.name, width=room)
        x -= text_width(name) + 4
        parts.append(f'<text x="{x:.0f}" y="{TOP + 7}">{escape(name)}</text>')
        x -= 20
        parts.append(legend_key(curve, number=number, x=x))
        x -= 8
    return parts


def legend_key(curve: Curve, *, number: int, x: float) -> str:
    """Return the line or the dot that stands for a curve in the legend, as an SVG element.

    Args:
        curve: The curve.
        number: Which curve of the chart it is; chooses color and dashes.
        x: Left end of the line.
    """
    color, dash = f"var(--c{number % COLORS})", DASHES[number % COLORS]
    if not curve.line:
        return f'<circle cx="{x + 8:.0f}" cy="{TOP + 3}" r="{DOT}" fill="{color}"/>'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x:.0f}" x2="{x + 16:.0f}" y1="{TOP + 3}" y2="{TOP + 3}"'
    return f'<line class="curve" {ends} stroke="{color}"{dashes}/>'
