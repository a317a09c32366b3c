"""A comparison of runs on a terminal, at most 80 columns wide unless numbers need more."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.report.comparison import Comparison, PairComparison
from partita.report.disagreements import Disagreement
from partita.report.measures import MetricEstimate
from partita.report.number_text import as_number
from partita.report.statistics import Difference, has_interval
from partita_schema.common.text import counted, value_text
from partita_schema.errors import shortened
from partita_schema.sections.outputs import direction_of

WIDEST = 80
MAX_KEY = 46
"""Characters of a key that are not broken."""
MIN_NAME = 12
"""Characters of a line of a name of a metric if the numbers leave no room for more."""
MAX_SETTINGS = 40
"""Keys that differ in the table."""
MAX_CELL = 60
"""Characters of a value in a table."""
STYLES = {"better": "green", "worse": "red"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print what differs in the configurations, the metrics with their differences, and rows that differ."""
    width = min(console.width, WIDEST)
    for number, name in enumerate(comparison.runs):
        console.print(f"{letter(number)}  {name}{'' if number else '  (reference)'}", markup=False, highlight=False)
    settings = settings_rows(comparison)
    if settings:
        print_settings(["what differs", *letters(comparison)], settings[:MAX_SETTINGS], console, width=width)
        if len(settings) > MAX_SETTINGS:
            console.print(f"and {len(settings) - MAX_SETTINGS} more; --json has all of them", highlight=False)
    elif comparison.settings is not None:
        console.print("\nthe configurations are the same")
    for number, pair in enumerate(comparison.pairs, start=1):
        print_pair(comparison, pair, letter(number), console, width=width)
    rows = recorded_rows(comparison)
    if rows:
        title = "recorded, untested" if comparison.pairs else "recorded metrics"
        console.print()
        print_numbers([title, *letters(comparison)], rows, console, width=width)
    for note in comparison.notes:
        console.print(f"\nnote: {note}", markup=False, highlight=False)


def letter(number: int) -> str:
    """Return what names a run in the titles of columns."""
    return chr(ord("A") + number) if number < 26 else f"#{number + 1}"


def letters(comparison: Comparison) -> list[str]:
    """Return what names each run in the titles of columns."""
    return [letter(number) for number in range(len(comparison.runs))]


def settings_rows(comparison: Comparison) -> list[list[str]]:
    """Return the keys that differ with the value of each run."""
    return [[key, *(one_line(value) or "-" for value in values)] for key, values in (comparison.settings or {}).items()]


def recorded_rows(comparison: Comparison) -> list[list[str]]:
    """Return the metrics that runs recorded of the compared split, or of all splits, and that were not compared."""
    compared = {f"{comparison.split}.{metric.metric}" for pair in comparison.pairs for metric in pair.metrics}
    # Of one output, exact_match is compared as that of the output. A loss that was not compared cannot be.
    compared |= {f"{comparison.split}.{name}" for name in ("exact_match", "loss", "perplexity") if comparison.pairs}
    start = f"{comparison.split}." if comparison.pairs else ""
    return [
        [name, *(as_number(name, value) for value in values)]
        for name, values in comparison.recorded.items()
        if name.startswith(start) and name not in compared and direction_of(name) is not None
    ]


def one_line(value: Any, *, most: int = MAX_CELL) -> str:
    """Return a value on one line of at most `most` characters; empty for None."""
    return shortened(" ".join(("" if value is None else value_text(value)).split()), most)


def answer_text(value: Any, *, most: int = MAX_CELL) -> str:
    """Return an answer or a reference on one line; `unreadable` for None."""
    return "unreadable" if value is None else one_line(value, most=most) or '""'


def print_pair(comparison: Comparison, pair: PairComparison, name: str, console: Console, *, width: int) -> None:
    """Print the metrics of a run against the reference, and the rows in which they differ.

    Args:
        comparison: The comparison.
        pair: The run against the reference.
        name: What names the run in titles.
        console: Where to print.
        width: Number of columns.
    """
    console.print(f"\n{name} against A, {comparison.subject}", style="bold", markup=False, highlight=False)
    table = [metric_row(metric) for metric in pair.metrics]
    titles = ["metric", "A", name, "difference", "95 % interval", "p", ""]
    print_numbers(titles, table, console, width=width)
    for one in pair.agreement:
        console.print(
            f"{one.output}: both right {one.both:,}, only A {one.only_first:,}, only {name} {one.only_second:,}, "
            f"neither {one.neither:,}",
            markup=False,
            highlight=False,
        )
    if pair.disagreements:
        shown = f"{len(pair.disagreements):,} of " if len(pair.disagreements) < pair.num_disagreements else ""
        different = counted(pair.num_disagreements, "row")
        console.print(f"\n{shown}{different} with other values", style="bold", highlight=False)
        for row in pair.disagreements:
            for line in disagreement_lines(row, comparison.runs[0], name):
                console.print(line, no_wrap=True, overflow="ellipsis", markup=False, highlight=False, width=width)


def metric_row(metric: MetricEstimate) -> list[str]:
    """Return the cells of a metric."""
    assert metric.reference is not None
    assert metric.difference is not None
    return [
        metric.metric,
        as_number(metric.metric, metric.reference.value),
        as_number(metric.metric, metric.result.value),
        signed(metric.metric, metric.difference.value),
        interval_text(metric.metric, metric.difference),
        p_text(metric.difference.p),
        {"no measurable difference": "-"}.get(str(metric.verdict), str(metric.verdict)),
    ]


def signed(name: str, value: float) -> str:
    """Format a difference of a metric with its sign."""
    text = as_number(name, value)
    return text if text.startswith("-") else f"+{text}"


def interval_text(name: str, difference: Difference) -> str:
    """Format the interval of a difference of a metric; empty if it has none."""
    return f"{signed(name, difference.low)} to {signed(name, difference.high)}" if has_interval(difference) else ""


def p_text(p: float) -> str:
    """Format a p-value."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def disagreement_lines(row: Disagreement, first: str, name: str) -> Iterator[str]:
    """Yield the lines of a row in which two runs differ.

    Args:
        row: The row.
        first: Name of the reference run.
        name: What names the other run in titles.
    """
    mark = "" if not row.better else "  (A is better)" if row.better == first else f"  ({name} is better)"
    yield f"{row.key}{mark}"
    yield f"  {one_line(row.prompt)}"
    reference = [] if row.reference is None else [f"reference: {answer_text(row.reference)}"]
    texts = [*reference, f"A: {answer_text(row.first)}", f"{name}: {answer_text(row.second)}"]
    joined = f"  {row.output}: {'   '.join(texts)}"
    if len(joined) <= WIDEST:
        yield joined
    else:
        yield from (f"  {row.output}, {text}" for text in texts)


def print_settings(titles: Sequence[str], rows: Sequence[Sequence[str]], console: Console, *, width: int) -> None:
    """Print a table of values, which may be broken, by keys, which are not.

    Args:
        titles: Titles of the columns.
        rows: The cells.
        console: Where to print.
        width: Maximum number of columns of the terminal.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    key_width = min(MAX_KEY, max(len(row[0]) for row in rows))
    for index, title in enumerate(titles):
        table.add_column(Text(title), overflow="fold", min_width=None if index else key_width)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table, highlight=False, width=width)


def print_numbers(titles: Sequence[str], rows: Sequence[Sequence[str]], console: Console, *, width: int) -> None:
    """Print a table of numbers by names. Only names are broken; if numbers are too wide, the table is too.

    Args:
        titles: Titles of the columns. All but the first and one without a title are aligned to the right.
        rows: The cells.
        console: Where to print.
        width: Number of columns of the terminal to use.
    """
    longest, *others = [max(map(cell_len, cells)) for cells in zip(titles, *rows, strict=True)]
    space = next((space for space in (2, 1) if longest + sum(others) + space * len(others) <= width), 1)
    needed = sum(others) + space * len(others)
    names = min(longest, max(width - needed, MIN_NAME))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, space, 0, 0), width=names + needed)
    for index, title in enumerate(titles):
        is_number = index > 0 and bool(title)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(
            Text(title), justify=justify, overflow="fold", no_wrap=index > 0, width=None if index else names
        )
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table, highlight=False, crop=False)
