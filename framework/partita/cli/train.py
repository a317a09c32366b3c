"""`partita train`: train, or with `trainer: {type: none}` evaluate, in a run directory."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.loading import start_model
from partita.cli.options import AsJson, Files, LogJson, Overrides, Quiet
from partita.cli.printing import print_metrics, print_wrapped
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path
from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, Problem

if TYPE_CHECKING:
    from partita_trainers.base import TrainResult


def train(
    files: Files,
    dataset: Annotated[
        str | None,
        typer.Option(help="Rows to train on instead of data.source, or - for standard input.", show_default=False),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    run: Annotated[
        Path | None,
        typer.Option(
            help="The run directory; an unfinished run is resumed. Default: runs/NAME, or the next free runs/NAME-2.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Train as configured in the file and evaluate the result. Rerun with the same --run to resume."""
    for file in files:
        if file.is_dir():
            run_flag = f"--run {shlex.quote(str(file))}"
            message = f"is a folder; write the YAML file, and {run_flag} after it to continue a run that lies there"
            raise ConfigError([Problem("", message, file=str(file))])
    model = start_model(files, overrides=overrides, quiet=quiet, one_process=dataset == STREAM)
    result = model.train(dataset_path(dataset, stdin_format), run=run)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(asdict(result) | {"run": str(result.run)}, indent=2))
        return
    if result.dialogues:
        rounds = {f"round {number}": dict(metrics) for number, metrics in enumerate(result.dialogues, start=1)}
        print_metrics(rounds, as_json=False, title="dialogues by round, each with the weights before it")
    if result.folds:
        print_folds(result)
        return
    print_metrics(result.metrics, as_json=False, title="metrics")
    continued = "" if result.resumed_from is None else f", continued from step {result.resumed_from}"
    early = ", stopped early" if result.stopped_early else ""
    print_wrapped(f"{counted(result.steps, 'step')}{early}{continued}; the run is in {result.run}")


def print_folds(result: "TrainResult") -> None:
    """Print the mean of each metric over the folds, and half the width of its interval."""
    columns: dict[str, Mapping[str, float]] = {}
    for split, metrics in result.metrics.items():
        columns[split] = metrics
        intervals = result.intervals[split]
        columns[f"\u00b1 {split}"] = {name: (high - low) / 2 for name, (low, high) in intervals.items()}
    print_metrics(columns, as_json=False, title=f"means of {len(result.folds)} folds, with 95 % confidence intervals")
    print_wrapped(f"{counted(result.steps, 'step')} in all; the runs of the folds are in {result.run}")
