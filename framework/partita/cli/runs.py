"""`partita runs`: list runs, show one, and remove what is not needed any more."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from partita.cli.options import AsJson
from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, DataError, JobError, Problem, ResumeError

LIST = "list"
OLD_DAYS = 30.0


class ListsByDefault(TyperGroup):
    """A group whose command without a name lists: `partita runs FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the name of the command if there is none."""
        if not args or (args[0] not in self.commands and args[0] not in self.get_help_option_names(ctx)):
            args = [LIST, *args]
        return super().parse_args(ctx, args)


runs = typer.Typer(
    cls=ListsByDefault,
    rich_markup_mode=None,
    help="List runs, show one, or remove what is not needed any more. Without a command: list.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the runs.")]


@runs.command(LIST)
def list_runs(
    folder: Folder = Path("runs"),
    sort: Annotated[
        Literal["date", "name", "metric", "size"],
        typer.Option(
            help="Order: date (newest first), name, metric (best first) or size (largest first).", metavar="KEY"
        ),
    ] = "date",
    metric: Annotated[
        str | None,
        typer.Option(help="The metric to show and sort by. Default: the main one of each run.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List runs: status, model, data, metric, age, size.

    This is also `partita runs FOLDER`.
    """
    from partita.runs.listing import find_metric, in_order, metric_names, read_runs

    found = read_runs(folder)
    names = metric_names(found)
    if metric is not None and find_metric(metric, dict.fromkeys(names, 0.0)) is None:
        known = f"they have {', '.join(names)}" if names else "they have no metrics yet"
        raise ConfigError([Problem("--metric", f"no run has {metric}; {known}")])
    found = in_order(found, sort, metric=metric)
    from partita.report.runs_table import as_json as to_json
    from partita.report.runs_table import print_runs

    if as_json:
        print(to_json(found, metric=metric))
    elif found:
        print_runs(found, new_console(), now=time.time(), metric=metric)
    else:
        print(f"there are no runs in {folder}")


@runs.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show one run: settings, metrics, files, how to continue it."""
    from partita.runs.listing import OUTPUTS, is_run, read_summary
    from partita.runs.manifest import sibling_runs

    if not is_run(run) and not any((run / name).is_dir() for name in OUTPUTS):
        raise DataError(f"{run} is not a run directory{sibling_runs(run)}")
    summary = read_summary(run)
    from partita.report.run_details import print_run
    from partita.report.runs_table import as_json as to_json

    if as_json:
        print(to_json([summary])[1:-1].strip())
    else:
        print_run(summary, new_console(), now=time.time())


@runs.command()
def clean(
    folder: Folder = Path("runs"),
    older_than: Annotated[
        float,
        typer.Option("--older-than", metavar="DAYS", min=0, help="Age of unfinished runs and cached tokens."),
    ] = OLD_DAYS,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove checkpoints of finished runs, and old unfinished ones.

    Lists checkpoints of finished runs, unfinished runs and cached tokens of that age, and torn files, with their sizes,
    and asks before it removes them. Never removes a model, a run that a process has open, or a file that partita did
    not write.
    """
    from partita.report.runs_table import print_removable
    from partita.runs.cleaning import removable_of_cache, removable_of_runs
    from partita.runs.listing import read_runs
    from partita_schema.common.files import user_cache_folder

    now = time.time()
    items = removable_of_runs(read_runs(folder), older_than_days=older_than, now=now)
    items += removable_of_cache(user_cache_folder() / "tokens", older_than_days=older_than, now=now)
    if not items:
        print(f"there is nothing to remove in {folder}")
        return
    print_removable(items, new_console())
    if not yes and not sys.stdin.isatty():
        raise DataError("nothing was removed: standard input is no terminal to ask on; add --yes to remove all of it")
    if yes or typer.confirm("Remove it?"):
        remove_all(items)
    else:
        print("nothing was removed")


def remove_all(items: list[Any]) -> None:
    """Remove items, and print how much was freed. What is in use is left alone.

    Raises:
        JobError: Some files cannot be removed; the reasons are printed.
    """
    from partita.report.number_text import bytes_text
    from partita.runs.cleaning import remove

    freed = incomplete = 0
    for item in items:
        try:
            removal = remove(item)
        except ResumeError as error:
            print(f"left alone: {error}", file=sys.stderr)
            continue
        freed += removal.freed
        incomplete += bool(removal.problems)
        for problem in removal.problems:
            print(f"not removed: {problem}", file=sys.stderr)
        if item.is_whole_run and item.folder.exists() and not removal.problems:
            print(f"{item.folder} holds other files, which are kept", file=sys.stderr)
    print(f"removed {bytes_text(freed)}")
    if incomplete:
        raise JobError(f"{incomplete} of {counted(len(items), 'place')} could not be removed completely")


def new_console() -> Any:
    """Return a console on standard output."""
    from rich.console import Console

    return Console(file=sys.stdout, markup=False)
