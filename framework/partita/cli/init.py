"""`partita init`: write a commented configuration for a task, from flags or prompts."""

import glob
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita_schema.errors import ConfigError, DataError, Problem, shortened
from partita_schema.templates import LEARNED, TASKS, template

if TYPE_CHECKING:
    from partita.data.first_rows import FirstRows
    from partita.data.proposal import Proposal

PLACEHOLDER = "train.jsonl"
"""Path of the rows if none is named."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder in which to write run.yaml.")] = Path(),
    task: Annotated[str | None, typer.Option("--task", help=f"One of {', '.join(TASKS)}.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A Hub id, a folder, or scratch.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="A file or glob with the rows.")] = None,
    train: Annotated[
        bool | None, typer.Option("--train/--zero-shot", help="Fine-tune, or use the model as it is.")
    ] = None,
) -> None:
    """Write a commented run.yaml for the columns of the data. On a terminal, ask for missing flags."""
    file = free_file(folder)
    if task is not None and task not in TASKS:
        raise ConfigError([Problem("--task", f"got {task}; write one of {', '.join(TASKS)}")])
    named = data is not None
    data = ask(data, "Rows: a csv, jsonl or parquet file", default=PLACEHOLDER)
    # Without data, the file names a path to write them to.
    rows = read_first_rows(data) if named or data != PLACEHOLDER or Path(data).exists() else None
    proposal = rows.propose(task) if rows else None
    chosen_task = ask(
        task, "What should the model do", default=proposal.task if proposal else "answer", choices=tuple(TASKS)
    )
    if rows and (proposal is None or chosen_task != proposal.task):
        proposal = rows.propose(chosen_task)
    model = ask(model, "Model: Hub id, folder, or scratch", default="meta-llama/Llama-3.2-1B-Instruct")
    trains = choose_training(train, task=chosen_task, model=model)
    # Relative paths are resolved against the file's folder.
    source = os.path.relpath(data, folder) if Path(data).exists() or matches_files(data) else data
    features, ignore_keys = (proposal.features, proposal.ignore_keys) if proposal else (None, ())
    text = template(chosen_task, model=model, data=source, train=trains, features=features, ignore_keys=ignore_keys)
    write_new(file, text)
    print_columns(data, rows, proposal, task=chosen_task, file=file, named=named)
    print(f"wrote {file}; next: partita validate {shlex.quote(str(file))}")


def free_file(folder: Path) -> Path:
    """Return the path of the file to write. Raise DataError if it exists, or if the folder is named like a file."""
    if folder.suffix in (".yaml", ".yml") and not folder.is_dir():
        raise DataError(
            f"{folder} is the name of a file; name the folder in which to write run.yaml, such as {folder.stem}"
        )
    file = folder / "run.yaml"
    if file.exists():
        raise DataError(f"{file} exists; remove it or name another folder")
    return file


def choose_training(train: bool | None, *, task: str, model: str) -> bool:
    """Return whether the file trains: as the flag says, else as the task needs it, else as the user answers.

    Raises:
        ConfigError: `--zero-shot` for a task that learns from answers.
    """
    if task in LEARNED:
        if train is False:
            message = f"the task {task} learns from answers; write --train, or --task answer"
            raise ConfigError([Problem("--zero-shot", message)])
        return True
    if train is None:
        return model == "scratch" or ask(None, "Train it", default="yes", choices=("yes", "no")) == "yes"
    return train


def write_new(file: Path, text: str) -> None:
    """Write the file, and create its folder. Raise WriteError if that is not possible."""
    from partita.runs.files import writing

    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def print_columns(
    data: str, rows: "FirstRows | None", proposal: "Proposal | None", *, task: str, file: Path, named: bool
) -> None:
    """Print what was found about the columns of the data, and warnings.

    Args:
        data: The rows, as the user named them.
        rows: Their columns; None if they were not read.
        proposal: The features that were proposed; None if no columns fit the task.
        task: The task.
        file: The file that was written.
        named: Whether the user named the rows.
    """
    warning = proposal.warning if proposal is not None else rows.warning if rows is not None else ""
    if proposal is not None:
        print(f"{data}: {proposal.summary}")
    elif rows is not None:
        columns = (
            f"its columns ({shortened(', '.join(rows.names), 300)}) do not" if rows.names else "it has no columns that"
        )
        print(f"{data}: {columns} fit the task {task}; replace the example features in {file}")
    elif named:
        what = "a folder" if Path(data).exists() else "no file on this machine"
        print(f"{data} is {what}, so its columns are not known; replace the example features in {file}")
    if warning:
        print(f"warning: {data}: {warning}", file=sys.stderr)


def matches_files(data: str) -> bool:
    """Return whether the data is a glob that matches files of this machine."""
    if "://" in data or not glob.has_magic(data):
        return False
    return bool(glob.glob(data, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def read_first_rows(data: str) -> "FirstRows | None":
    """Return the columns of the data, as `partita.data.first_rows` does, which is imported only now."""
    from partita.data import first_rows

    return first_rows.read_first_rows(data)


def ask(value: str | None, question: str, *, default: str, choices: tuple[str, ...] = ()) -> str:
    """Return the flag, else the answer to a prompt on the terminal, else the default.

    Args:
        value: Value of the flag, if it was set.
        question: Text of the prompt.
        default: Answer if the user only presses Enter, or if there is no terminal.
        choices: All valid answers; empty if any text is valid.
    """
    if value is not None:
        return value
    if not sys.stdin.isatty():
        return default
    from rich.prompt import Prompt

    return Prompt.ask(question, default=default, choices=list(choices) or None)
