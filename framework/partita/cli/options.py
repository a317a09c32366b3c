"""Options shared by several commands, and loading of the command's model."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from partita_schema.errors import ConfigError, Problem

if TYPE_CHECKING:
    from partita.model import Model

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML configuration file.", show_default=False)]
FileOrRun = Annotated[
    Path, typer.Argument(metavar="FILE_OR_RUN", help="A YAML file, or a run directory.", show_default=False)
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, such as trainer.epochs=1."),
]
AnswerOverrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the file, such as generation.max_new_tokens=16."
    ),
]
SimulationOverrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, such as simulation.max_turns=4."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Batch size; overrides the file.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors, no progress or log.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that FILE_OR_RUN names, even if it is a run or a saved model by another author.",
    ),
]


def open_model(path: Path, *, overrides: list[str], quiet: bool, trust_remote_code: bool = False) -> "Model":
    """Load the model of a YAML file or of a run directory.

    A file states with its own key `trust_remote_code` whether its code may run; the option overrides the key. For a
    directory, only the option allows the code that it names.

    Args:
        path: A YAML file, a run directory or a saved model.
        overrides: Values for keys of the file, as of `--set`.
        quiet: Show no progress.
        trust_remote_code: Whether the option of this name was set.

    Raises:
        ConfigError: If there is no such file or run, or its configuration is invalid.
    """
    from partita.distributed.world import get_world
    from partita.model import Model
    from partita.runs.log import show_log

    show_log(quiet=quiet, rank=get_world().rank)
    check_there(path)
    if path.is_dir():
        return Model.load(path, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    trusted = ["trust_remote_code=true"] if trust_remote_code else []
    return Model(path, overrides=[*overrides, *trusted], quiet=quiet)


def check_there(path: Path) -> None:
    """Raise ConfigError if a path is neither a file nor a run, and list the existing ones."""
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return
    from partita.backends.context import RUNS
    from partita.runs.manifest import sibling_runs
    from partita_schema.load import near_files

    runs = sibling_runs(path) or near_files(path) + sibling_runs(RUNS / path.name)
    raise ConfigError([Problem("", f"there is no such file or run{runs}", file=str(path))])


def start_model(
    path: Path, *, overrides: list[str], quiet: bool, trust_remote_code: bool = False, one_process: bool = False
) -> "Model":
    """Load the model, in each of the processes that its file asks for; the launching process does not return.

    Only rank 0 logs and prints results.

    Args:
        path: A YAML file, a run directory or a saved model.
        overrides: Values for keys of the file, as of `--set`.
        quiet: Show no progress.
        trust_remote_code: Whether the option of this name was set.
        one_process: Whether the command uses standard input or output, which several processes cannot share.

    Raises:
        ConfigError: As in `open_model`; or with `one_process`, if the file asks for several processes.
    """
    from partita.backends.launch import end_with_launcher, is_to_be_launched, launch
    from partita.distributed.world import get_world

    rank = get_world().rank
    model = open_model(path, overrides=overrides, quiet=quiet or rank > 0, trust_remote_code=trust_remote_code)
    if one_process and (is_to_be_launched(model.config) or get_world().world_size > 1):
        raise ConfigError([Problem("backend", "several processes cannot share standard input or output; name a file")])
    if is_to_be_launched(model.config):
        raise SystemExit(launch(model.config, sys.argv[1:]))
    end_with_launcher()
    if rank > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- until the process ends
    return model


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
    Console(file=sys.stdout).print(table)


def format_cell(name: str, value: float | None) -> str:
    """Format a cell of the table: counts as integers, other values with four decimals, or digits if they are small."""
    if value is None:
        return ""
    if name.rpartition(".")[2] in ("n", "skipped"):
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
