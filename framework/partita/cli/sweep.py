"""`partita sweep`: run a file with several values of some keys, and name the best ones."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.loading import check_there, loading_libraries
from partita.cli.options import AsJson, Files, LogJson, Overrides, Quiet
from partita.cli.printing import print_wrapped
from partita.cli.standard_streams import STREAM
from partita_schema.common.text import counted
from partita_schema.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from partita.runs.sweep_result import SweepResult

MAX_TRIALS = 20
"""Trials in the table."""
BORDERS = 3
"""Characters of a column beside its cells."""


def sweep(
    files: Files,
    dataset: Annotated[
        str | None, typer.Option(help="Rows to train on instead of data.source.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the sweep. Default: sweeps/NAME.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that run trials; overrides the file.", show_default=False),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Train the trials of the section `sweep`, and name the best. Rerun to continue."""
    from partita.runs.log import show_log

    show_log(quiet=quiet, rank=0)
    if dataset == STREAM:
        raise DataError("--dataset: trials in other processes cannot read standard input; write the rows to a file")
    for path in files:
        check_there(path)
    with loading_libraries():
        from partita.sweeps.sweep import Sweep
    result = Sweep(list(files), overrides=overrides, quiet=quiet).run(dataset, folder, workers=workers)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(result.record() | {"folder": str(result.folder)}, indent=2))
        return
    print_result(result)


def print_result(result: "SweepResult") -> None:
    """Print the trials, the best first, and how to use the best one."""
    from rich.console import Console

    from partita.runs.sweep_result import parameter_text, predict_command

    console = Console(file=sys.stdout, markup=False)
    console.print(table_of(result, width=console.width))
    best = result.best
    assert best is not None
    values = ", ".join(f"{key}: {parameter_text(value)}" for key, value in best.values.items())
    print_wrapped(f"best: trial {best.number}, {result.metric} {result.value_of(best):.4g} ({values})")
    print_wrapped(f"use it: {predict_command(result.model_of(best))}")


def table_of(result: "SweepResult", *, width: int) -> "Table":
    """Return a table with a row per trial, the best first, in which headings fit a number of columns if possible."""
    from rich.table import Table

    from partita.runs.sweep_result import parameter_text, short_names

    ranked = result.ranked
    trials = [*ranked, *(trial for trial in result.trials if trial not in ranked)]
    title = f"{counted(len(trials), 'trial')}, the best first"
    if len(trials) > MAX_TRIALS:
        title = f"{MAX_TRIALS} of {len(trials):,} trials, the best first (all in {result.folder / 'sweep.json'})"
    rows = []
    for trial in trials[:MAX_TRIALS]:
        state = trial.result.state if trial.result is not None else "waiting"
        value = f"{result.value_of(trial):.4g}" if trial in ranked else state
        rows.append([str(trial.number), value, *map(parameter_text, trial.values.values())])
    table = Table(title=title, title_justify="left")
    for name in headings(["trial", result.metric, *short_names(list(result.trials[0].values)).values()], rows, width):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def headings(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return names of columns in as few lines as make a table fit, and in their shortest ones if none do.

    Args:
        names: The names.
        rows: The cells of the table.
        width: Number of columns of the terminal.
    """
    from rich.cells import cell_len

    from partita.report.runs_table import broken

    for most in range(max(map(len, names)), -1, -1):
        titles = [broken(name, most) for name in names]
        columns = [
            max(map(cell_len, [*title.split("\n"), *cells])) for title, *cells in zip(titles, *rows, strict=True)
        ]
        if sum(columns) + BORDERS * len(columns) + 1 <= width:
            break
    return titles
