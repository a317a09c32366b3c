"""Parallel coordinates: an axis for each quantity, and a line through the values of each item."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from partita.report.charts.axes import Axis, Scale, axis_of, tick_label
from partita.report.charts.chart import HEIGHT, WIDTH, Chart, Table, fitted, shortened, svg

SIDE, TOP, BOTTOM = 34, 26, 34
MAX_TICKS = 6


@dataclass(frozen=True)
class Dimension:
    """One of the axes."""

    name: str
    values: Sequence[Any]
    """A number of each item, or anything else with a few different values."""
    scale: Scale = "linear"
    is_category: bool = False
    """Whether the values are names, not numbers."""
    order: Sequence[str] = ()
    """Names from the bottom to the top. Default: in the order of the items."""


@dataclass(frozen=True)
class PlacedDimension:
    """An axis in the picture, with the position of each item."""

    dimension: Dimension
    x: float
    positions: Sequence[float]
    ticks: Sequence[tuple[float, str]]


def parallel_chart(title: str, dimensions: Sequence[Dimension], *, order: Sequence[int], note: str = "") -> Chart:
    """Return a chart with a line for each item.

    Args:
        title: What it shows.
        dimensions: The axes from left to right.
        order: Indices of the items, the best first; it is drawn last and in another color, later ones are fainter.
        note: A sentence below the chart.
    """
    gap = (WIDTH - 2 * SIDE) / max(1, len(dimensions) - 1)
    placed = [place(dimension, x=SIDE + number * gap) for number, dimension in enumerate(dimensions)]
    parts: list[str] = []
    for rank, item in reversed(list(enumerate(order))):
        points = " ".join(f"{one.x:.1f},{one.positions[item]:.1f}" for one in placed)
        opacity = 0.25 + 0.55 * (1 - rank / len(order))
        look = 'stroke="var(--c1)" stroke-width="2.6"' if rank == 0 else f'stroke="var(--c0)" opacity="{opacity:.2f}"'
        parts.append(f'<polyline class="curve" {look} points="{points}"/>')
    # Names at the same height are those of every second axis; the first and the last one start at the edge.
    room = (SIDE - 4 + 2 * gap) / 1.5 - 4
    for number, one in enumerate(placed):
        parts += draw_axis(one, number=number, last=number == len(placed) - 1, room=room)
    titles = [dimension.name for dimension in dimensions]
    rows = [[cell(dimension.values[item]) for dimension in dimensions] for item in order]
    return Chart(title, svg(title, parts), Table(titles, rows), note)


def place(dimension: Dimension, *, x: float) -> PlacedDimension:
    """Return an axis at a horizontal position."""
    start, end = HEIGHT - BOTTOM, TOP
    if dimension.is_category:
        names = list(dimension.order or dict.fromkeys(dimension.values))
        axis = Axis(0, max(1, len(names) - 1), start, end)
        at = {name: axis.position(index) if len(names) > 1 else (start + end) / 2 for index, name in enumerate(names)}
        ticks = [(position, cell(name)) for name, position in at.items()]
        return PlacedDimension(dimension, x, [at[value] for value in dimension.values], ticks)
    axis = axis_of(list(dimension.values), start=start, end=end, scale=dimension.scale)
    ticks = [(axis.position(value), tick_label(value)) for value in axis.ticks(4)]
    return PlacedDimension(dimension, x, [axis.position(value) for value in dimension.values], ticks)


def draw_axis(placed: PlacedDimension, *, number: int, last: bool, room: float) -> list[str]:
    """Return the SVG elements of an axis. Names alternate between two heights, so that neighbors do not overlap.

    Args:
        placed: The axis.
        number: Number of the axis, from 0.
        last: Whether it is the rightmost one.
        room: Width of its name.
    """
    x, bottom = placed.x, HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{x:.1f},{TOP}V{bottom}" style="stroke: var(--ink)"/>']
    for y, text in placed.ticks[:MAX_TICKS]:
        label = escape(shortened(text, most=9))
        parts.append(f'<path class="axis" d="M{x:.1f},{y:.1f}h-3"/>')
        parts.append(
            f'<text x="{x + 4:.1f}" y="{y + 3.5:.1f}" paint-order="stroke" stroke="var(--paper)" stroke-width="3" '
            f'text-anchor="start">{label}</text>'
            if not last
            else f'<text x="{x - 4:.1f}" y="{y + 3.5:.1f}" paint-order="stroke" stroke="var(--paper)" stroke-width="3" '
            f'text-anchor="end">{label}</text>'
        )
    anchor = "start" if number == 0 else "end" if last else "middle"
    at = 4 if number == 0 else WIDTH - 4 if last else x
    name = escape(fitted(placed.dimension.name, width=min(room, WIDTH / 2 - 8)))
    height = HEIGHT - 16 + 13 * (number % 2)
    parts.append(f'<text x="{at:.1f}" y="{height}" text-anchor="{anchor}">{name}</text>')
    return parts


def cell(value: Any) -> str:
    """Return a value as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
