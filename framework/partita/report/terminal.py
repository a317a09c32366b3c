"""Batch sizes on a terminal: a sentence, a table and two small charts for each."""

import textwrap
from collections.abc import Mapping
from itertools import chain

from rich.console import Console

from partita.report.batch_sizes import (
    ProbeTable,
    budget_in_sight,
    digits,
    heading,
    measured,
    memory,
    memory_points,
    most_rows,
    probe_table,
    speed_points,
)
from partita.report.text_chart import ASCII, UNICODE, Chart, Letters, draw
from partita_trainers.batch_size.probe import BatchSize

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
        if measured({purpose: size}):
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
    beside = len(both) == 2 and width >= SIDE_BY_SIDE
    each = (width - GAP) // 2 if beside else min(width, WIDEST // 2)
    drawn = [draw(chart, width=each, height=HEIGHT, letters=letters) for chart in both]
    lines = map((" " * GAP).join, zip(*drawn, strict=True)) if beside else chain.from_iterable(drawn)
    return [line.rstrip() for line in lines] + textwrap.wrap(legend(size, letters), width)


def memory_chart(size: BatchSize) -> Chart:
    """Return the chart of memory over rows."""
    budget = budget_in_sight(size)
    hidden = size.budget_bytes is not None and budget is None
    return Chart(
        title="memory taken" + (f", of {memory(size.budget_bytes)}" if hidden else ""),
        bars=[(probe.rows, held) for probe, held in memory_points(size) if probe.verdict == "fits"],
        most_rows=most_rows(size),
        show=memory,
        marks=marks(size),
        level=budget,
        signs=[(probe.rows, probe.verdict) for probe in size.probes if probe.verdict != "fits"],
    )


def speed_chart(size: BatchSize) -> Chart:
    """Return the chart of rows per second over rows."""
    return Chart(
        title="rows a second",
        bars=speed_points(size),
        most_rows=most_rows(size),
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
    limit = [] if budget is None else [f"{letters.level * 2} budget {memory(budget)}"]
    verdicts = {probe.verdict for probe in size.probes}
    signs = [f"{sign} {verdict}" for verdict, sign in letters.signs.items() if verdict in verdicts]
    return "   ".join(pointed + limit + signs)
