"""`-` for standard input after --dataset, and for standard output after --output."""

import atexit
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from partita.inference.predictions import Predictions

STREAM = "-"

StdinFormat = Annotated[
    Literal["jsonl", "csv", "tsv", "json", "txt"],
    typer.Option("--stdin-format", help="Format of the rows with --dataset -."),
]


def dataset_path(dataset: str | None, stdin_format: str) -> str | None:
    """Return the dataset as it was named; for `-` a file that holds what standard input has, removed at exit.

    The name of the file is always `stdin.FORMAT`, so that the same input again has the same keys and is resumed.
    """
    if dataset != STREAM:
        return dataset
    folder = tempfile.mkdtemp(prefix="partita-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / f"stdin.{stdin_format}"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return str(path)


@contextmanager
def stdout_for_data() -> Iterator[IO[bytes]]:
    """In this context standard output is the binary file that is yielded; whatever else is printed goes to stderr."""
    data = sys.stdout.buffer
    with redirect_stdout(sys.stderr):
        yield data
    data.flush()


def print_rows(predictions: "Predictions", file: IO[bytes]) -> None:
    """Write predictions as JSON lines."""
    from partita.inference.record import json_line
    from partita.inference.tables import plain

    for row in predictions:
        file.write(json_line({name: plain(row[name]) for name in predictions.columns}))
