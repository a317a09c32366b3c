"""Batch sizes on a terminal: a sentence, a table and two small bar charts for each.

The horizontal axis of a chart is logarithmic and starts at one row. With ASCII output, bars consist of whole
characters; otherwise their tops are drawn to an eighth of a line.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rich.console import Console

from partita.report.batch_sizes import (
    ProbeTable,
    budget_in_sight,
    drawable_sizes,
    heading,
    max_rows,
    memory_points,
    probe_table,
    speed_points,
)
from partita.report.number_text import bytes_text, digits
from partita_trainers.batch_size.probe import BatchSize


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
class TerminalChart:
    """A bar chart over rows."""

    title: str
    bars: Sequence[tuple[int, float]]
    """(rows, value); no value is negative."""
    max_rows: int
    """Right end of the axis."""
    show: Callable[[float], str]
    """Formats a value for the vertical axis."""
    marks: Mapping[str, int]
    """Rows to mark, by a name of `Letters.marks`."""
    level: float | None = None
    """A limit, drawn as a horizontal line."""
    signs: Sequence[tuple[int, str]] = ()
    """Rows with a sign on the level instead of a bar, and its name in `Letters.signs`."""


def draw(chart: TerminalChart, *, width: int, height: int, letters: Letters) -> list[str]:
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
        margin + numbers(chart.max_rows, columns=columns),
        margin + pointers(chart, columns=columns, letters=letters),
    ]
    return [line.ljust(width)[:width] for line in (chart.title, *lines, *feet)]


def label_lines(chart: TerminalChart, *, top: float, height: int) -> list[str]:
    """Return the labels left of the vertical axis, the highest line first: those of the level and the top."""
    labels = [""] * height
    labels[0] = chart.show(top)
    if chart.level is not None:
        # If both are on one line, the level is more important.
        labels[height - 1 - line_of(chart.level, top=top, height=height)] = chart.show(chart.level)
    return labels


def grid(chart: TerminalChart, *, top: float, columns: int, height: int, letters: Letters) -> list[str]:
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
        column = column_of(rows, max_rows=chart.max_rows, columns=columns)
        for line, letter in enumerate(bar(value / top * height, height=height, letters=letters)):
            if letter != " ":
                cells[line][column] = letter
    for rows, name in chart.signs:
        cells[level_line][column_of(rows, max_rows=chart.max_rows, columns=columns)] = letters.signs[name]
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


def column_of(rows: int, *, max_rows: int, columns: int) -> int:
    """Return the column, from 0 at the left, of a number of rows: 1 at the left end, `max_rows` at the right."""
    return round(math.log2(rows) / math.log2(max(2, max_rows)) * (columns - 1))


def numbers(max_rows: int, *, columns: int) -> str:
    """Return the axis numbers: 1, the last number, and as many powers of two as fit, each from its column on."""
    text = [" "] * columns
    powers = [2**power for power in range(max_rows.bit_length())]
    for rows in (1, max_rows, *powers):
        word = f"{rows:,}"
        start = min(column_of(rows, max_rows=max_rows, columns=columns), columns - len(word))
        gap = text[max(0, start - 1) : start + len(word) + 1]
        if all(letter == " " for letter in gap):
            text[start : start + len(word)] = word
    return "".join(text)


def pointers(chart: TerminalChart, *, columns: int, letters: Letters) -> str:
    """Return a mark in the column of each marked number of rows; of two in one column, the first."""
    text = [" "] * columns
    for name, rows in reversed(list(chart.marks.items())):
        text[column_of(rows, max_rows=chart.max_rows, columns=columns)] = letters.marks[name]
    return "".join(text)


WIDEST = 80
"""Maximum number of columns of charts and text."""
SIDE_BY_SIDE = 60
"""Minimum number of columns for two charts side by side."""
HEIGHT = 7
GAP = 3
TIE = "\N{NO-BREAK SPACE}"


def print_sizes(sizes: Mapping[str, BatchSize], console: Console) -> None:
    """Print all sizes, in characters of the console's encoding, at most 80 columns wide."""
    letters = ASCII if console.options.ascii_only else UNICODE
    width = min(console.width, WIDEST)
    for number, (purpose, size) in enumerate(sizes.items()):
        if number:
            print_lines("", console)
        print_lines(textwrap.fill(heading(purpose, size), width), console)
        if size.probes:
            print_table(probe_table(purpose, size), console, letters=letters)
        if size.throughputs:
            print_lines(textwrap.fill(f"rows/s: {paces(size)}", width).replace(TIE, " "), console)
        if drawable_sizes({purpose: size}):
            print_lines("", console)
            print_lines("\n".join(charts(size, width=width, letters=letters)), console)


def print_lines(text: str, console: Console, *, style: str | None = None) -> None:
    """Print without markup, highlighting or cropping; a narrow terminal wraps lines itself."""
    console.print(text, style=style, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False)


def paces(size: BatchSize) -> str:
    """List the speeds that were compared; a line break never separates a size from its speed."""
    return ", ".join(f"{digits(speed)}{TIE}at{TIE}{rows:,}" for rows, speed in sorted(size.throughputs))


def print_table(table: ProbeTable, console: Console, *, letters: Letters) -> None:
    """Print numbers right-aligned and the verdict left-aligned, with the size in use in bold."""
    columns = list(zip(table.titles, *table.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    for number, row in enumerate((table.titles, *table.rows)):
        cells = [f"{cell:>{width}}" for cell, width in zip(row[:-1], widths, strict=False)]
        used = number > 0 and table.used[number - 1]
        print_lines("   ".join((*cells, row[-1])), console, style="bold" if used else None)
        if number == 0:
            print_lines("   ".join(letters.axis * width for width in widths), console)


def charts(size: BatchSize, *, width: int, letters: Letters) -> list[str]:
    """Return memory and speed over rows, side by side if there is room, and a legend."""
    both = [chart for chart in (memory_chart(size), speed_chart(size)) if chart.bars or chart.signs]
    side_by_side = len(both) == 2 and width >= SIDE_BY_SIDE
    each = (width - GAP) // 2 if side_by_side else min(width, WIDEST // 2)
    drawn = [draw(chart, width=each, height=HEIGHT, letters=letters) for chart in both]
    lines = map((" " * GAP).join, zip(*drawn, strict=True)) if side_by_side else chain.from_iterable(drawn)
    return [line.rstrip() for line in lines] + textwrap.wrap(legend(size, letters), width)


def memory_chart(size: BatchSize) -> TerminalChart:
    """Return the chart of memory over rows."""
    budget = budget_in_sight(size)
    hidden = size.budget_bytes is not None and budget is None
    return TerminalChart(
        title="memory taken" + (f", of {bytes_text(size.budget_bytes)}" if hidden else ""),
        bars=[(probe.rows, used) for probe, used in memory_points(size) if probe.verdict == "fits"],
        max_rows=max_rows(size),
        show=bytes_text,
        marks=marks(size),
        level=budget,
        signs=[(probe.rows, probe.verdict) for probe in size.probes if probe.verdict != "fits"],
    )


def speed_chart(size: BatchSize) -> TerminalChart:
    """Return the chart of rows per second over rows."""
    return TerminalChart(
        title="rows a second",
        bars=speed_points(size),
        max_rows=max_rows(size),
        show=digits,
        marks=marks(size),
    )


def marks(size: BatchSize) -> dict[str, int]:
    """Return the marked sizes; the best one is first and represents both if they are equal."""
    return {name: rows for name, rows in (("best", size.best), ("fits", size.max_fitting)) if rows is not None}


def legend(size: BatchSize, letters: Letters) -> str:
    """Return the legend of the marks in use, in one line."""
    pointed = [f"{letters.marks[name]} {name} {rows:,}" for name, rows in marks(size).items()]
    if size.best is not None and size.best == size.max_fitting:
        pointed = [f"{letters.marks['best']} best and fits {size.best:,}"]
    budget = budget_in_sight(size)
    limit = [] if budget is None else [f"{letters.level * 2} budget {bytes_text(budget)}"]
    verdicts = {probe.verdict for probe in size.probes}
    signs = [f"{sign} {verdict}" for verdict, sign in letters.signs.items() if verdict in verdicts]
    return "   ".join(pointed + limit + signs)
