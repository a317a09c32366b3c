"""The metrics of a run with their intervals, beside those of the base model."""

import math
from collections.abc import Sequence

from partita.report.charts import Table
from partita.report.measures import MetricEstimate, SplitMeasures, lower_is_better
from partita.report.number_text import as_number
from partita.report.run_record import RunRecord
from partita.report.section import NamedTable, Paragraph, Part, Section
from partita.report.statistics import Difference, Interval, has_interval
from partita_schema.common.text import counted
from partita_schema.sections.outputs import METRICS_BY_NAME

REASONS = {
    "bits_per_byte": "the bytes of single rows are not recorded",
    "auroc": "the scores of all labels are recorded for up to 10 labels",
    "average_precision": "the scores of all labels are recorded for up to 10 labels",
}
"""Why a metric has no interval, by the end of its name."""
NOT_DETERMINED = "the results of rows do not determine them"
CONSTANT = "all resamples of the rows have the same value"
MAX_METRICS = 24
"""Metrics in a table that is not folded."""
MAX_BESIDE = 16
"""The same in the table of a split beside that of the most important one."""
LOWER = " \u2193"
NOTE = (
    "In brackets: 95 % intervals over rows; of shares of right rows the score interval, of others the bootstrap. "
    "\u2193: lower is better."
)


def metrics_section(run: RunRecord, splits: Sequence[SplitMeasures]) -> Section | None:
    """Return the metrics of each split that was evaluated row by row, and all other recorded ones.

    Args:
        run: The run.
        splits: Metrics of the splits with results of rows.
    """
    parts: list[Part] = [split_table(split, is_first=split is splits[0]) for split in splits]
    parts += [table for split in splits for table in field_tables(split)]
    parts += [Paragraph(NOTE, kind="note")] if splits else []
    parts += [Paragraph(text, kind="note") for text in [without_interval(splits)] if text]
    shown = {split.split for split in splits}
    others = {split: values for split, values in run.metrics.items() if split not in shown}
    names = list(dict.fromkeys(name for values in others.values() for name in values))
    if names:
        rows = [[name, *(as_number(name, values.get(name)) for values in others.values())] for name in names]
        caption = "Metrics without results of rows" if parts else "Metrics"
        parts.append(NamedTable(caption, Table(["metric", *others], rows), folded=len(rows) > MAX_METRICS))
    return Section("Metrics", parts) if parts else None


def without_interval(splits: Sequence[SplitMeasures]) -> str:
    """Return which metrics have no interval, and why; empty if all have one."""
    names: dict[str, list[str]] = {}
    for measure in (measure for split in splits for measure in split.measures if not is_of_field(measure.metric)):
        reason = REASONS.get(measure.metric.rpartition(".")[2], NOT_DETERMINED)
        reason = CONSTANT if math.isfinite(measure.result.low) else reason
        if not measure.has_interval and measure.metric not in names.get(reason, ()):
            names.setdefault(reason, []).append(measure.metric)
    parts = [f"{', '.join(known)} ({reason})" for reason, known in names.items()]
    return f"Without an interval: {'; '.join(parts)}." if parts else ""


def split_table(split: SplitMeasures, *, is_first: bool) -> NamedTable:
    """Return the table of a split. Wide and long tables of splits after the first are folded.

    Args:
        split: Its metrics.
        is_first: Whether it is the most important split.
    """
    measures = [measure for measure in split.measures if not is_of_field(measure.metric)]
    rows = [row_of(measure, has_base=split.has_base) for measure in measures]
    caption = f"{split.split}, {counted(split.rows, 'row')}"
    is_large = split.has_base or len(rows) > MAX_BESIDE
    return NamedTable(caption, Table(titles_of(split), rows), folded=is_large and not is_first)


def field_tables(split: SplitMeasures) -> list[NamedTable]:
    """Return the folded table of the metrics of single fields and slots; none without them."""
    measures = [measure for measure in split.measures if is_of_field(measure.metric)]
    rows = [row_of(measure, has_base=split.has_base) for measure in measures]
    return [NamedTable(f"{split.split}: metrics of fields", Table(titles_of(split), rows), folded=True)] if rows else []


def is_of_field(name: str) -> bool:
    """Return whether a metric is that of a field or slot of a JSON object."""
    return any(part in name for part in METRICS_BY_NAME)


def titles_of(split: SplitMeasures) -> list[str]:
    """Return the titles of the columns."""
    return ["metric", "this model", *(["base model", "difference"] if split.has_base else [])]


def row_of(measure: MetricEstimate, *, has_base: bool) -> list[str]:
    """Return the cells of a metric."""
    name = measure.metric + (LOWER if lower_is_better(measure.metric) else "")
    cells = [name, with_interval(measure.metric, measure.result)]
    if has_base:
        cells += [
            with_interval(measure.metric, measure.reference),
            with_interval(measure.metric, measure.difference, sign="+"),
        ]
    return cells


def with_interval(name: str, value: Interval | Difference | None, *, sign: str = "") -> str:
    """Return a value with its interval; empty without a value.

    Args:
        name: Name of the metric.
        value: The value.
        sign: Written before values above 0.
    """
    if value is None:
        return ""
    low, high = (as_number(name, end) for end in (value.low, value.high))
    text = (sign if value.value > 0 else "") + as_number(name, value.value)
    return f"{text} ({low} to {high})" if has_interval(value) else text
