"""`partita compare`: what differs between runs, and whether one is better on the same rows."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import AsJson

EXAMPLES = 10


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run directories, the reference first.", show_default=False)
    ],
    split: Annotated[
        str | None,
        typer.Option(
            help="The rows, such as test, or the history of dialogues, such as predicted. Default: the first one that "
            "all runs have.",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[int, typer.Option("--examples", "-n", min=0, help="Rows to print that differ.")] = EXAMPLES,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Page to write: .html.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: their settings, and their metrics row by row."""
    from partita.report.comparison import compare_runs

    if html is not None:
        from partita.report.compare_page import check_page

        check_page(html)
    comparison = compare_runs(runs, split=split, max_examples=examples)
    if html is not None:
        from partita.report.compare_page import write_page

        write_page(html, comparison)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(comparison.record(), indent=2))
        return
    from rich.console import Console

    from partita.report.comparison_table import print_comparison

    print_comparison(comparison, Console(file=sys.stdout, markup=False))
    if html is not None:
        print(f"\nwritten to {html}")
