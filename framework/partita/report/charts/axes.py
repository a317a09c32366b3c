"""Axes of charts: the positions of values, round ticks, and their labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from partita.report.charts.chart import HEIGHT, WIDTH, fitted

LEFT, RIGHT, TOP, BOTTOM = 52, 10, 14, 40
"""Margins around the plotted area: tick labels on the left and below it."""
SHORT = 200
"""Ratio of the ends of a logarithmic axis below which powers of ten alone are too few ticks."""
SPACE = 14
"""Space above the highest value, for the legend."""

Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Axis:
    """One axis: its values, their positions in the picture, and its ticks."""

    low: float
    high: float
    start: float
    """Position of `low`."""
    end: float
    """Position of `high`."""
    scale: Scale = "linear"
    is_whole: bool = False
    """Whether all values are whole numbers, and so are the ticks."""

    def position(self, value: float) -> float:
        """Return the position of a value in the picture."""
        low, high, value = (self._warped(one) for one in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values on the axis."""
        if self.scale == "log":
            return self._log_ticks(count)
        span = (self.high - self.low) or 1.0
        rough = span / count
        magnitude = 10 ** math.floor(math.log10(rough))
        step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough)
        step = max(1.0, math.ceil(step)) if self.is_whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def _log_ticks(self, count: int) -> list[float]:
        """Return about `count` powers of ten on the axis, and on a short axis 2 and 5 times the powers."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        step = max(1, math.ceil((last - first) / count))
        factors = (1, 2, 5) if self.high < SHORT * self.low else (1,)
        values = [factor * 10.0**power for power in range(first, last + 1, step) for factor in factors]
        inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
        return inside if len(inside) > 1 else [self.low, self.high]

    def _warped(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.scale == "log" else value


def axis_of(values: Sequence[float], *, start: float, end: float, scale: Scale = "linear") -> Axis:
    """Return an axis that holds all finite values.

    Args:
        values: The values.
        start: Position of the lowest value in the picture.
        end: Position of the highest value.
        scale: linear or log.
    """
    finite = [value for value in values if math.isfinite(value) and (scale == "linear" or value > 0)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if low == high:
        low, high = (low / 2, high * 2) if scale == "log" else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    is_whole = all(value == int(value) for value in finite) and high - low >= 1
    return Axis(low, high, start, end, scale, is_whole)


def tick_label(value: float) -> str:
    """Format the value of a tick in few characters."""
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    for divisor, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * divisor or (abs(value) >= divisor and value % (divisor / 10) == 0):
            return f"{value / divisor:g}{letter}"
    return f"{value:.4g}"


def frame(x_axis: Axis, y_axis: Axis, *, x_label: str, y_label: str) -> list[str]:
    """Return the SVG elements of both axes with ticks and names.

    Args:
        x_axis: The horizontal axis.
        y_axis: The vertical axis.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
    """
    bottom = HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT},{TOP}V{bottom}H{WIDTH - RIGHT}"/>']
    for value in x_axis.ticks(5):
        x = x_axis.position(value)
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v4"/>')
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{tick_label(value)}</text>')
    for value in y_axis.ticks(5):
        y = y_axis.position(value)
        parts.append(f'<path class="axis" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" opacity=".5"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick_label(value)}</text>')
    room = WIDTH - RIGHT - 4
    x_name, y_name = (escape(fitted(label, width=room)) for label in (x_label, y_label))
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{x_name}</text>')
    parts.append(f'<text x="4" y="{TOP - 4}">{y_name}</text>')
    return parts
