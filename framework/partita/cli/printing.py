"""Printing text and metrics to standard output."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    """Print to standard output, or to `file`; on a terminal, wrap lines at spaces."""
    from partita.runs.log import terminal_width, wrap

    stream = sys.stdout if file is None else file
    print(wrap(text, width=terminal_width()) if stream.isatty() else text, file=stream)


def print_metrics(metrics: Mapping[str, Mapping[str, Any]], *, as_json: bool, title: str) -> None:
    """Print a table with one row per metric and one column per split or output, or JSON."""
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(metrics, indent=2))
        return
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    if not names:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("metric", overflow="fold")
    for column in metrics:
        table.add_column(column, justify="right", overflow="fold")
    for name in names:
        table.add_row(name, *(format_cell(name, values.get(name)) for values in metrics.values()))
    Console(file=sys.stdout, markup=False).print(table)


def print_label_tables(output: str, metrics: Mapping[str, Any]) -> None:
    """Print the metrics of each label of an output, and its most frequent errors; nothing if it has none.

    Args:
        output: Name of the output.
        metrics: Its part of the result of `Model.evaluate`.
    """
    from rich.console import Console

    from partita.report.label_tables import error_table, label_table

    for table in (label_table(output, metrics.get("per_label", {})), error_table(output, metrics.get("confusion", []))):
        if table is not None:
            Console(file=sys.stdout, markup=False).print(table)


def format_cell(name: str, value: float | None) -> str:
    """Format a cell of the table: counts as integers, other values with four decimals, or digits if they are small."""
    from partita.report.number_text import is_count

    if value is None:
        return ""
    if is_count(name):
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
