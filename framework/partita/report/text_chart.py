"""Bars over batch size, drawn with letters.

The horizontal axis is logarithmic, from a single row on. Where the output knows ASCII only, bars are whole letters;
elsewhere their tops are drawn to an eighth of a line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Letters:
    """What a chart is drawn with."""

    eighths: str
    """Tops of bars, from empty to full."""
    level: str
    axis: str
    corner: str
    wall: str
    marks: Mapping[str, str]
    """Below the axis, by name."""
    signs: Mapping[str, str]
    """On the level, by name."""


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
    """Bars over rows."""

    title: str
    bars: Sequence[tuple[int, float]]
    """(rows, value); none is below 0."""
    most_rows: int
    """The right end of the axis."""
    show: Callable[[float], str]
    """A value in words, for the vertical axis."""
    marks: Mapping[str, int]
    """Rows that are pointed at, by a name of `Letters.marks`."""
    level: float | None = None
    """A limit, drawn as a horizontal line."""
    signs: Sequence[tuple[int, str]] = ()
    """Rows with a sign on the level in place of a bar, and its name in `Letters.signs`."""


def draw(chart: Chart, *, width: int, height: int, letters: Letters) -> list[str]:
    """Lines of `width` letters: the title, `height` lines of bars, the axis, its numbers, and the marks."""
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
    """Words left of the vertical axis, the highest line first: the level's and the top's."""
    labels = [""] * height
    labels[0] = chart.show(top)
    if chart.level is not None:
        # Where both fall on one line, the level is what a reader looks for.
        labels[height - 1 - line_of(chart.level, top=top, height=height)] = chart.show(chart.level)
    return labels


def grid(chart: Chart, *, top: float, columns: int, height: int, letters: Letters) -> list[str]:
    """What is drawn between the axes, the highest line first."""
    cells = [[" "] * columns for _ in range(height)]
    level_line = height - 1 if chart.level is None else line_of(chart.level, top=top, height=height)
    if chart.level is not None:
        cells[level_line] = [letters.level] * columns
    # Of bars that share a column the highest is drawn last, and hides the others.
    for rows, value in sorted(chart.bars, key=lambda point: point[1]):
        place = column_of(rows, most_rows=chart.most_rows, columns=columns)
        for line, letter in enumerate(bar(value / top * height, height=height, letters=letters)):
            if letter != " ":
                cells[line][place] = letter
    for rows, name in chart.signs:
        cells[level_line][column_of(rows, most_rows=chart.most_rows, columns=columns)] = letters.signs[name]
    return ["".join(line) for line in reversed(cells)]


def bar(length: float, *, height: int, letters: Letters) -> list[str]:
    """A bar of so many lines from the bottom up; what is not nothing shows at least the least there is."""
    # The smallest part that is drawn at all: an eighth, or where there are whole letters only, half a line.
    least = next(number for number, letter in enumerate(letters.eighths) if letter != " ")
    eighths = max(round(length * 8), least if length > 0 else 0)
    return [letters.eighths[min(8, max(0, eighths - 8 * line))] for line in range(height)]


def line_of(value: float, *, top: float, height: int) -> int:
    """Line, from 0 at the bottom, in which a bar of this value ends."""
    return min(height - 1, max(0, math.ceil(value / top * height) - 1))


def column_of(rows: int, *, most_rows: int, columns: int) -> int:
    """Column, from 0 at the left, of a number of rows: 1 at the left end, `most_rows` at the right."""
    return round(math.log2(rows) / math.log2(max(2, most_rows)) * (columns - 1))


def numbers(most_rows: int, *, columns: int) -> str:
    """Powers of two under the axis, each beginning in its column, as many as find room; the last number first."""
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
    """A mark in the column of each number of rows that is pointed at; of two in one column, the first."""
    text = [" "] * columns
    for name, rows in reversed(list(chart.marks.items())):
        text[column_of(rows, most_rows=chart.most_rows, columns=columns)] = letters.marks[name]
    return "".join(text)
