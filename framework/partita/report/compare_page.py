"""A comparison of runs as a page: one file that needs neither a network nor scripts, for light and dark mode."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from partita.report.charts import Chart, Table
from partita.report.charts.axes import BOTTOM, RIGHT, TOP, Axis, axis_of, tick_label
from partita.report.charts.chart import WIDTH, fitted, svg
from partita.report.comparison import Comparison, PairComparison
from partita.report.comparison_table import answer_text, interval_text, metric_row, settings_rows, signed
from partita.report.disagreements import Disagreement
from partita.report.measures import MetricEstimate
from partita.report.number_text import as_number
from partita.report.page import render_page
from partita.report.section import Charts, NamedTable, Paragraph, Part, Passage, Passages, Section
from partita.runs.files import output_file, why_not_written
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted
from partita_schema.errors import DataError, WriteError
from partita_schema.sections.outputs import direction_of

TESTS = (
    "p: McNemar's exact test for right and wrong rows, with the interval of Agresti and Min; the paired bootstrap for "
    "other metrics."
)
LINE_HEIGHT = 22
NAMES_WIDTH = 130
"""Width of the names of metrics, left of the intervals, and of the space after them."""
NAMES_SPACE = 8
MAX_VALUE = 1_000
"""Characters of a value of a row."""


def check_page(path: Path) -> None:
    """Raise DataError if a page cannot have this name."""
    if path.suffix not in (".html", ".htm"):
        raise DataError(f"{path} is no name of a page; end it with .html")


def write_page(path: Path, comparison: Comparison) -> None:
    """Write the page of a comparison.

    Raises:
        WriteError: The file cannot be written.
    """
    title = " and ".join(comparison.runs) if len(comparison.runs) == 2 else f"{len(comparison.runs)} runs"
    text = render_page(title, lead=lead(comparison), sections=sections_of(comparison))
    try:
        write_atomically(output_file(path), text)
    except OSError as error:
        raise WriteError(why_not_written(error, path)) from None


def lead(comparison: Comparison) -> str:
    """Return the first sentences of the page: whether each run is better than the reference."""
    reference = comparison.runs[0]
    if not comparison.pairs:
        return f"The runs have no results of the same rows as {reference}."
    sentences = [verdict(pair, reference) for pair in comparison.pairs]
    return f"{' '.join(sentences)} Compared on the {comparison.subject} that all runs have."


def verdict(pair: PairComparison, reference: str) -> str:
    """Return a sentence on the main metric of a run against the reference."""
    metric = pair.main
    if metric is None or metric.reference is None or metric.difference is None:
        return f"{pair.run} has no metric in common with {reference}."
    name = metric.metric
    values = f"{name} {as_number(name, metric.result.value)} against {as_number(name, metric.reference.value)}"
    difference = metric.difference
    ends = interval_text(name, difference)
    interval = f"difference {signed(name, difference.value)}{f', 95 % interval {ends}' if ends else ''}"
    if metric.verdict == "no measurable difference":
        return f"No measurable difference between {pair.run} and {reference}: {values} ({interval})."
    return f"{pair.run} is {metric.verdict} than {reference}: {values} ({interval})."


def sections_of(comparison: Comparison) -> list[Section]:
    """Return the sections of the page."""
    sections = [section for pair in comparison.pairs for section in pair_sections(pair, comparison)]
    if comparison.settings:
        table = Table(["key", *comparison.runs], settings_rows(comparison))
        sections.append(Section("What differs", [NamedTable("", table, numbers=False)]))
    elif comparison.settings is not None:
        sections.append(Section("What differs", [Paragraph("The configurations are the same.")]))
    if comparison.recorded:
        rows = [[name, *(as_number(name, value) for value in values)] for name, values in comparison.recorded.items()]
        table = Table(["metric", *comparison.runs], rows)
        caption = "Latest metrics of each run, of all its rows"
        recorded = NamedTable(caption, table, folded=bool(comparison.pairs))
        sections.append(Section("Recorded metrics", [recorded]))
    if comparison.notes:
        notes = [Paragraph(f"{note[0].upper()}{note[1:]}.") for note in comparison.notes]
        sections.append(Section("Notes", notes))
    return sections


def pair_sections(pair: PairComparison, comparison: Comparison) -> list[Section]:
    """Return the sections of a run against the reference: metrics, and rows that differ."""
    reference = comparison.runs[0]
    titles = ["metric", reference, pair.run, "difference", "95 % interval", "p", f"{pair.run} is"]
    rows = [metric_row(metric) for metric in pair.metrics]
    parts: list[Part] = [NamedTable("Metrics on the same rows", Table(titles, rows), note=TESTS)]
    if pair.agreement:
        counts = [
            [one.output, *(f"{number:,}" for number in (one.both, one.only_first, one.only_second, one.neither))]
            for one in pair.agreement
        ]
        titles = ["right rows", "both", f"only {reference}", f"only {pair.run}", "neither"]
        parts.append(NamedTable("Agreement", Table(titles, counts)))
    shares = [metric for metric in pair.metrics if is_share(metric)]
    if shares:
        parts.append(Charts([interval_chart(f"Differences: {pair.run} against {reference}", shares)]))
    sections = [Section(f"{pair.run} against {reference}", parts)]
    if pair.disagreements:
        shown = f"{len(pair.disagreements):,} of {counted(pair.num_disagreements, 'row')} with other values"
        passages = [passage_of(one, runs=(reference, pair.run)) for one in pair.disagreements]
        title = f"Rows in which {pair.run} and {reference} differ"
        sections.append(Section(title, [Passages(shown, passages, folded=False)]))
    return sections


def passage_of(row: Disagreement, *, runs: tuple[str, str]) -> Passage:
    """Return a row in which two runs differ."""
    title = f"{row.key}, {row.output}{f': {row.better} is better' if row.better else ''}"
    both = zip(runs, (row.first, row.second), strict=True)
    values = [(run, answer_text(value, most=MAX_VALUE)) for run, value in both]
    reference = [] if row.reference is None else [("reference", answer_text(row.reference, most=MAX_VALUE))]
    return Passage(title, (), before=row.prompt, facts=[*reference, *values])


def is_share(metric: MetricEstimate) -> bool:
    """Return whether a metric of both runs is between 0 and 1 and better if higher, so that it shares an axis."""
    assert metric.reference is not None
    values = (metric.reference.value, metric.result.value)
    return direction_of(metric.metric) == "higher" and min(values) >= 0 and max(values) <= 1


def interval_chart(title: str, metrics: Sequence[MetricEstimate]) -> Chart:
    """Return a chart of differences with their intervals, one below the other, and a line at 0.

    Args:
        title: What it shows.
        metrics: The metrics, all on one scale.
    """
    height = TOP + LINE_HEIGHT * len(metrics) + BOTTOM
    differences = [(one.metric, one.difference) for one in metrics if one.difference is not None]
    values = [0.0, *(value for _, one in differences for value in (one.low, one.high))]
    axis = axis_of(values, start=NAMES_WIDTH, end=WIDTH - RIGHT)
    zero, bottom = axis.position(0.0), height - BOTTOM
    parts = [f'<line class="mark" x1="{zero:.1f}" x2="{zero:.1f}" y1="{TOP}" y2="{bottom}"/>']
    parts += ticks(axis, bottom=bottom)
    for number, (metric, difference) in enumerate(differences):
        y = TOP + LINE_HEIGHT * (number + 0.5)
        low, middle, high = (axis.position(value) for value in (difference.low, difference.value, difference.high))
        name = fitted(metric, width=NAMES_WIDTH - NAMES_SPACE)
        parts.append(f'<text x="{NAMES_WIDTH - NAMES_SPACE}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<line class="curve" stroke="var(--c0)" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="3.2" fill="var(--c0)"/>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 6}" text-anchor="end">difference, 95 % interval</text>')
    rows = [[name, *(signed(name, value) for value in (one.value, one.low, one.high))] for name, one in differences]
    return Chart(title, svg(title, parts, height=height), Table(["metric", "difference", "low", "high"], rows))


def ticks(axis: Axis, *, bottom: float) -> list[str]:
    """Return the SVG elements of a horizontal axis."""
    parts = [f'<path class="axis" d="M{NAMES_WIDTH},{bottom}H{WIDTH - RIGHT}"/>']
    for value in axis.ticks(4):
        x = axis.position(value)
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        parts.append(f'<path class="axis" d="M{x:.1f},{bottom}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{tick_label(value)}</text>')
    return parts
