"""Bar charts over batch size in text.

The horizontal axis is logarithmic and starts at one row. With ASCII output, bars consist of whole characters; otherwise
their tops are drawn to an eighth of a line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Letters:
    """The characters of a chart."""

    eighths: str
    """Tops of bars, from empty to full."""
    level: str
    axis: str
    corner: str
    wall: str
    marks: Mapping[str, str]
    """Marks below the axis, by name."""
    signs: Mapping[str, str]
    """Signs on the level, by name."""


UNICODE = Letters(
    eighths=" ▁▂▃▄▅▆▇█",
    level="╌",
    axis="─",
    corner="└",
    wall="│",
    marks={"best": "▲", "fits": "△"},
    signs={"too large": "+", "out of memory": "✗"},
)
ASCII = Letters(
    eighths="     ####",
    level="-",
    axis="-",
    corner="+",
    wall="|",
    marks={"best": "b", "fits": "f"},
    signs={"too large": "*", "out of memory": "x"},
)


@dataclass(frozen=True)
class Chart:
    """A bar chart over rows."""

    title: str
    bars: Sequence[tuple[int, float]]
    """(rows, value); no value is negative."""
    most_rows: int
    """Right end of the axis."""
    show: Callable[[float], str]
    """Formats a value for the vertical axis."""
    marks: Mapping[str, int]
    """Rows to mark, by a name of `Letters.marks`."""
    level: float | None = None
    """A limit, drawn as a horizontal line."""
    signs: Sequence[tuple[int, str]] = ()
    """Rows with a sign on the level instead of a bar, and its name in `Letters.signs`."""


def draw(chart: Chart, *, width: int, height: int, letters: Letters) -> list[str]:
    """Draw a chart: the title, lines of bars, the axis, its numbers, and the marks.

    Args:
        chart: The chart.
        width: Characters of every line.
        height: Number of lines of bars.
        letters: Characters to draw with.
    """
    top = max([value for _, value in chart.bars] + [chart.level or 0.0]) or 1.0
    labels = label_lines(chart, top=top, height=height)
    gutter = max(len(label) for label in labels)
    columns = width - gutter - 2
    body = grid(chart, top=top, columns=columns, height=height, letters=letters)
    lines = [f"{label:>{gutter}} {letters.wall}{line}" for label, line in zip(labels, body, strict=True)]
    margin = " " * (gutter + 2)
    feet = [
        f"{'0':>{gutter}} {letters.corner}{letters.axis * columns}",
        margin + numbers(chart.most_rows, columns=columns),
        margin + pointers(chart, columns=columns, letters=letters),
    ]
    return [line.ljust(width)[:width] for line in (chart.title, *lines, *feet)]


def label_lines(chart: Chart, *, top: float, height: int) -> list[str]:
    """Return the labels left of the vertical axis, the highest line first: those of the level and the top."""
    labels = [""] * height
    labels[0] = chart.show(top)
    if chart.level is not None:
        # If both are on one line, the level is more important.
        labels[height - 1 - line_of(chart.level, top=top, height=height)] = chart.show(chart.level)
    return labels


def grid(chart: Chart, *, top: float, columns: int, height: int, letters: Letters) -> list[str]:
    """Return the lines between the axes, the highest first.

    Args:
        chart: The chart.
        top: Value of the highest line.
        columns: Characters of every line.
        height: Number of lines.
        letters: Characters to draw with.
    """
    cells = [[" "] * columns for _ in range(height)]
    level_line = height - 1 if chart.level is None else line_of(chart.level, top=top, height=height)
    if chart.level is not None:
        cells[level_line] = [letters.level] * columns
    # Of bars that share a column, the highest is drawn last and hides the others.
    for rows, value in sorted(chart.bars, key=lambda point: point[1]):
        place = column_of(rows, most_rows=chart.most_rows, columns=columns)
        for line, letter in enumerate(bar(value / top * height, height=height, letters=letters)):
            if letter != " ":
                cells[line][place] = letter
    for rows, name in chart.signs:
        cells[level_line][column_of(rows, most_rows=chart.most_rows, columns=columns)] = letters.signs[name]
    return ["".join(line) for line in reversed(cells)]


def bar(length: float, *, height: int, letters: Letters) -> list[str]:
    """Return a bar of `length` lines from the bottom up; a positive value shows at least the smallest part."""
    # The smallest visible part: an eighth, or half a line with whole characters only.
    least = next(number for number, letter in enumerate(letters.eighths) if letter != " ")
    eighths = max(round(length * 8), least if length > 0 else 0)
    return [letters.eighths[min(8, max(0, eighths - 8 * line))] for line in range(height)]


def line_of(value: float, *, top: float, height: int) -> int:
    """Return the line, from 0 at the bottom, in which a bar of this value ends."""
    return min(height - 1, max(0, math.ceil(value / top * height) - 1))


def column_of(rows: int, *, most_rows: int, columns: int) -> int:
    """Return the column, from 0 at the left, of a number of rows: 1 at the left end, `most_rows` at the right."""
    return round(math.log2(rows) / math.log2(max(2, most_rows)) * (columns - 1))


def numbers(most_rows: int, *, columns: int) -> str:
    """Return the axis numbers: 1, the last number, and as many powers of two as fit, each from its column on."""
    text = [" "] * columns
    powers = [2**power for power in range(most_rows.bit_length())]
    for rows in (1, most_rows, *powers):
        word = f"{rows:,}"
        start = min(column_of(rows, most_rows=most_rows, columns=columns), columns - len(word))
        room = text[max(0, start - 1) : start + len(word) + 1]
        if all(letter == " " for letter in room):
            text[start : start + len(word)] = word
    return "".join(text)


def pointers(chart: Chart, *, columns: int, letters: Letters) -> str:
    """Return a mark in the column of each marked number of rows; of two in one column, the first."""
    text = [" "] * columns
    for name, rows in reversed(list(chart.marks.items())):
        text[column_of(rows, most_rows=chart.most_rows, columns=columns)] = letters.marks[name]
    return "".join(text)
