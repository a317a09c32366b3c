"""Flags that several commands share, and the model that a command works on."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from partita_schema.errors import ConfigError, Problem

if TYPE_CHECKING:
    from partita.model import Model

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file of the run.", show_default=False)]
FileOrRun = Annotated[
    Path, typer.Argument(metavar="FILE_OR_RUN", help="A YAML file, or the directory of a run.", show_default=False)
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Another value for a key of the file, such as trainer.epochs=1."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows at a time, over the file's.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no log, only the result and errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]


TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that FILE_OR_RUN names, also where it is a run or a saved model of somebody else.",
    ),
]


def open_model(path: Path, *, overrides: list[str], quiet: bool, trust_remote_code: bool = False) -> "Model":
    """The model of a YAML file, or of a run's directory.

    A file is the user's own word: there, `trust_remote_code` is what the key of that name says. Of a directory it
    allows what the directory names.
    """
    from partita.distributed.world import get_world
    from partita.logs import show_log
    from partita.model import Model

    show_log(quiet=quiet, rank=get_world().rank)
    check_there(path)
    if path.is_dir():
        return Model.load(path, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    trusted = ["trust_remote_code=true"] if trust_remote_code else []
    return Model(path, overrides=[*overrides, *trusted], quiet=quiet)


def check_there(path: Path) -> None:
    """Raise ConfigError for a path that names neither a file nor a run, with the names that there are."""
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return
    from partita.runs.finding import runs_beside
    from partita.runtime import RUNS
    from partita_schema.load import near_files

    runs = runs_beside(path) or near_files(path) + runs_beside(RUNS / path.name)
    raise ConfigError([Problem("", f"there is no such file or run{runs}", file=str(path))])


def start_model(
    path: Path, *, overrides: list[str], quiet: bool, trust_remote_code: bool = False, one_process: bool = False
) -> "Model":
    """The model, in each of as many processes as its file asks for; the one that starts them never comes back.

    Only rank 0 logs and prints results. With `one_process`, a file that asks for several is a ConfigError.
    """
    from partita.distributed.launch import end_with_launcher, is_to_be_launched, launch
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
    """Print to standard output, or to `file`; on a terminal lines break at spaces."""
    from partita.logs import terminal_width, wrapped

    stream = sys.stdout if file is None else file
    print(wrapped(text, width=terminal_width()) if stream.isatty() else text, file=stream)


def print_metrics(metrics: Mapping[str, Mapping[str, Any]], *, as_json: bool, title: str) -> None:
    """A table with a row a metric and a column a split or output, or JSON."""
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
    table.add_column("metric")
    for column in metrics:
        table.add_column(column, justify="right")
    for name in names:
        table.add_row(name, *(shown(name, values.get(name)) for values in metrics.values()))
    Console(file=sys.stdout).print(table)


def shown(name: str, value: float | None) -> str:
    """A cell of the table: numbers of rows are whole, everything else has four places."""
    if value is None:
        return ""
    return f"{value:,.0f}" if name.rpartition(".")[2] in ("n", "skipped") else f"{value:.4f}"
