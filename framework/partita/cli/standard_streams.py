"""`-` as standard input for --dataset and as standard output for --output."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal, get_args

import typer

from partita_schema.errors import DataError, shortened

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions

STREAM = "-"
BEGINNING = 64_000
"""Bytes read to check that standard input is JSON lines."""

StdinFormatName = Literal["jsonl", "csv", "tsv", "json", "txt"]
"""Names of the formats in `partita.data.formats` that standard input may have; a literal, so that `--help` is fast."""
StdinFormat = Annotated[
    StdinFormatName,
    typer.Option(
        "--stdin-format",
        metavar="FORMAT",
        help=f"Format of the rows on standard input: {', '.join(get_args(StdinFormatName))}.",
    ),
]
OTHER_FORMATS = [name for name in get_args(StdinFormatName) if name != "jsonl"]


def dataset_path(dataset: str | None, stdin_format: str) -> str | None:
    """Return the dataset as named; for `-`, copy standard input to a temporary file that is removed at exit.

    The file is always named `stdin.FORMAT`, so that rows of the same input have the same keys and can be resumed.
    Raises DataError if the input is empty, or with `jsonl` if no row is JSON.
    """
    if dataset != STREAM:
        return dataset
    path = copied_stdin(f"stdin.{stdin_format}", hint="pipe the rows into the command, or name a file after --dataset")
    if stdin_format == "jsonl":
        with path.open("rb") as file:
            check_json_lines(file.read(BEGINNING).decode("utf-8-sig", "replace").strip())
    return str(path)


def config_path(file: Path) -> Path:
    """Return a file; for `-`, copy standard input to a temporary file. Raise DataError if the input is empty."""
    return copied_stdin("stdin.yaml", hint="pipe a configuration into the command") if str(file) == STREAM else file


def copied_stdin(name: str, *, hint: str) -> Path:
    """Copy standard input to a temporary file that is removed at exit. Raise DataError with a hint if it is empty."""
    import atexit
    import tempfile

    folder = tempfile.mkdtemp(prefix="partita-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / name
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    if not path.stat().st_size:
        raise DataError(f"standard input is empty; {hint}")
    return path


def check_json_lines(text: str) -> None:
    """Raise DataError if the text is in another format, and name the option to write. UTF-16 is left to the reader."""
    is_array = re.match(r"\[\s*\{", text)
    if not text or "\0" in text or (re.search(r"^\s*\{", text, re.MULTILINE) and not is_array):
        return
    line = text.splitlines()[0]
    wanted = "json" if is_array else "tsv" if "\t" in line else "csv" if re.search(r"[,;|]", line) else "FORMAT"
    known = f" ({', '.join(OTHER_FORMATS[:-1])} or {OTHER_FORMATS[-1]})" if wanted == "FORMAT" else ""
    raise DataError(
        f"standard input is not JSON lines, its first line is {shortened(line)!r}; write --stdin-format {wanted}{known}"
    )


@contextmanager
def stdout_for_data() -> Iterator[IO[bytes]]:
    """Yield standard output as a binary file for data; in this context, other output goes to standard error."""
    data = sys.stdout.buffer
    with redirect_stdout(sys.stderr):
        yield data
    data.flush()


def print_rows(predictions: "Predictions", file: IO[bytes]) -> None:
    """Write predictions as JSON lines."""
    from partita.generation.record import json_line
    from partita.generation.tables import plain

    for row in predictions:
        file.write(json_line({name: plain(row[name]) for name in predictions.columns}))
