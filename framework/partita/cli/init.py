"""`partita init`: a commented configuration for a task, from flags or questions."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.templates import TASKS, template


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the new run.yaml.")] = Path(),
    task: Annotated[str | None, typer.Option("--task", help=f"One of {', '.join(TASKS)}.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Hub id, a folder, or scratch.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="File or glob of the rows.")] = None,
    train: Annotated[
        bool | None, typer.Option("--train/--zero-shot", help="Fine-tune, or use the model as it is.")
    ] = None,
) -> None:
    """Write a commented run.yaml; asks for what no flag says when there is someone to ask."""
    file = folder / "run.yaml"
    if file.exists():
        raise DataError(f"{file} exists; remove it or name another folder")
    task = ask(task, "What should the model do", default="answer", choices=tuple(TASKS))
    if task not in TASKS:
        raise ConfigError([Problem("--task", f"got {task}; write one of {', '.join(TASKS)}")])
    model = ask(model, "Model: Hub id, folder, or scratch", default="meta-llama/Llama-3.2-1B-Instruct")
    data = ask(data, "Rows: a csv, jsonl or parquet file", default="train.jsonl")
    if train is None:
        train = model == "scratch" or ask(None, "Train it", default="yes", choices=("yes", "no")) == "yes"
    folder.mkdir(parents=True, exist_ok=True)
    # Paths in a file start at the file.
    data = os.path.relpath(data, folder) if Path(data).exists() else data
    file.write_text(template(task, model=model, data=data, train=train), encoding="utf-8")
    print(f"wrote {file}; next: partita validate {file}")


def ask(given: str | None, question: str, *, default: str, choices: tuple[str, ...] = ()) -> str:
    """The flag, else the answer of a person at the terminal, else the default."""
    if given is not None:
        return given
    if not sys.stdin.isatty():
        return default
    from rich.prompt import Prompt

    return Prompt.ask(question, default=default, choices=list(choices) or None)
