"""Tables on a terminal: runs, as wide as the terminal, and what can be removed."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from partita.report.number_text import age_text, as_number, bytes_text
from partita.runs.cleaning import Removable
from partita.runs.listing import OUTPUTS, MetricValue, RunSummary, data_of, model_of
from partita_schema.common.text import counted

WIDEST = 80
"""Maximum number of columns of the details."""
GAP = 2
"""Spaces between columns."""
TITLES = ("run", "status", "model", "data", "metric", "age", "size")
SHORTENED = ("model", "data")
"""Columns whose cells are shortened, not wrapped."""
LEAST_WIDTHS = (
    *(("data", 8), ("model", 8), ("run", 16), ("data", 6), ("model", 6), ("metric", 15), ("run", 12)),
    *(("metric", 8), ("data", 3), ("model", 3)),
)
"""Widths down to which columns are narrowed, in this order, if a table is too wide."""
STYLES = {"running": "cyan", "done": "green", "unreadable": "red", "failed": "red", "dead": "yellow"}


def print_runs(runs: Sequence[RunSummary], console: Console, *, now: float, metric: str | None = None) -> None:
    """Print a table of runs, and the reasons of those that failed or cannot be read.

    Args:
        runs: The runs.
        console: Where to print.
        now: The time in seconds since 1970.
        metric: Name of the metric to show. Default: the main one of each run.
    """
    rows = [cells_of(run, now=now, metric=metric) for run in runs]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for title, width in zip(TITLES, widths_of([TITLES, *rows], total=console.width), strict=True):
        shortens, right = title in SHORTENED, title in ("age", "size")
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if shortens else "fold"
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(title, width=width, no_wrap=shortens, overflow=overflow, justify=justify)
    for run, (name, *others) in zip(runs, rows, strict=True):
        style = STYLES.get(run.status)
        cells = broken(name, table.columns[0].width or 0), *others
        table.add_row(*(Text(cell, style=style or "" if cell == run.status else "") for cell in cells))
    console.print(table, highlight=False)
    for run in runs:
        if run.problem:
            style = STYLES.get(run.status)
            console.print(f"{run.name}: {run.problem}", markup=False, highlight=False, style=style, soft_wrap=True)


def cells_of(run: RunSummary, *, now: float, metric: str | None) -> tuple[str, ...]:
    """Return the cells of a run, in the order of TITLES.

    Args:
        run: The run.
        now: The time in seconds since 1970.
        metric: Name of the metric to show. Default: the main one of the run.
    """
    value = metric_text(run.metric(metric), run.config)
    age, size = age_text(now - run.updated), bytes_text(run.bytes)
    outputs = (name for name in OUTPUTS if (run.folder / name).is_dir())
    data = short_data(run.manifest) if run.config else ", ".join(outputs)
    return run.name, run.status, short_model(run.config), data, value, age, size


def widths_of(rows: Sequence[Sequence[str]], *, total: int) -> list[int]:
    """Return the widths of columns: model and data are shortened first, then names and metrics wrap.

    Args:
        rows: The cells, with those of the header.
        total: Number of columns of the terminal.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    too_wide = sum(widths) + GAP * (len(widths) - 1) - total
    for title, least in LEAST_WIDTHS:
        index = TITLES.index(title)
        cut = max(0, min(too_wide, widths[index] - least))
        widths[index] -= cut
        too_wide -= cut
    return widths


def broken(name: str, width: int) -> str:
    """Return a name in lines of at most `width` characters, ended after separators; longer parts are whole lines."""
    lines = [""]
    for part in re.findall(r"[^/._-]*[/._-]?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def short_model(config: Mapping[str, Any]) -> str:
    """Return the base model without the owner of its id or the folders of its path, and without "new"."""
    return model_of(config).removeprefix("new ").rstrip("/").rpartition("/")[2]


def short_data(manifest: Mapping[str, Any]) -> str:
    """Return the names of the sources without their folders."""
    return ", ".join(Path(part).name for part in data_of(manifest).split(", "))


def metric_text(value: MetricValue | None, config: Mapping[str, Any]) -> str:
    """Return a metric with its split, unless that is test, and without the name of the output if it is the only one."""
    if value is None:
        return ""
    outputs = config.get("output_features") or []
    name = value.name.removeprefix(f"{outputs[0]['name']}.") if len(outputs) == 1 else value.name
    return f"{'' if value.split == 'test' else f'{value.split} '}{name} {as_number(value.name, value.value)}"


def print_removable(items: Sequence[Removable], console: Console) -> None:
    """Print what can be removed, with sizes and their sum."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0), width=min(console.width, WIDEST))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for item in items:
        table.add_row(bytes_text(item.bytes), f"{item.folder}: {item.what}")
    console.print(table, highlight=False)
    total = sum(item.bytes for item in items)
    console.print(f"{bytes_text(total)} in {counted(len(items), 'place')}", highlight=False)


def as_json(runs: Sequence[RunSummary], *, metric: str | None = None) -> str:
    """Return runs as a JSON array."""
    return json.dumps([run.record(metric) for run in runs], indent=2)
