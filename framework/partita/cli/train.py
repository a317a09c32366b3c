"""`partita train`: train, or with `trainer: {type: none}` evaluate, in a run directory."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import AsJson, File, Overrides, Quiet, print_metrics, print_wrapped, start_model
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path
from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, Problem


def train(
    file: File,
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
) -> None:
    """Train as configured in FILE and evaluate the result. Rerun with the same --run to resume."""
    if file.is_dir():
        message = f"is a folder; write the YAML file, and --run {file} after it to continue a run that lies there"
        raise ConfigError([Problem("", message, file=str(file))])
    model = start_model(file, overrides=overrides, quiet=quiet, one_process=dataset == STREAM)
    result = model.train(dataset_path(dataset, stdin_format), run=run)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(asdict(result) | {"run": str(result.run)}, indent=2))
        return
    if result.dialogues:
        rounds = {f"round {number}": dict(metrics) for number, metrics in enumerate(result.dialogues, start=1)}
        print_metrics(rounds, as_json=False, title="dialogues by round, each with the weights before it")
    print_metrics(result.metrics, as_json=False, title="metrics")
    continued = "" if result.resumed_from is None else f", continued from step {result.resumed_from}"
    early = ", stopped early" if result.stopped_early else ""
    print_wrapped(f"{counted(result.steps, 'step')}{early}{continued}; the run is in {result.run}")
