"""`partita predict`: answers for every row of a dataset, in input order."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partita.cli.loading import open_model, start_model
from partita.cli.options import AnswerOverrides, AsJson, BatchSize, FilesOrRun, LogJson, Quiet, TrustRemoteCode
from partita.cli.printing import print_wrapped
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path, print_rows, stdout_for_data

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions

Dataset = Annotated[
    str,
    typer.Option(help="Rows to predict: a file, a glob, a Hub id, or - for standard input.", show_default=False),
]
Output = Annotated[
    Path,
    typer.Option(
        help="File to write: .jsonl, .csv or .parquet, or - for JSON lines on standard output.",
        show_default=False,
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Address of partita serve with FILE_OR_RUN, which answers the rows; its token is in PARTITA_TOKEN.",
        show_default=False,
    ),
]


def predict(
    sources: FilesOrRun,
    dataset: Dataset,
    output: Output,
    stdin_format: StdinFormat = "jsonl",
    batch_size: BatchSize = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Retry rows that ended in an error.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier answers and start over.")] = False,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="In a .csv, escape cells that a spreadsheet would run as a formula.")
    ] = False,
    server: Server = None,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Predict every row of a dataset. Rerun the same command to resume."""
    to_stdout = str(output) == STREAM
    if to_stdout and as_json:
        raise typer.BadParameter("standard output has the predictions with --output -; leave --json out")
    with stdout_for_data() if to_stdout else nullcontext() as data:
        load = open_model if server is not None else partial(start_model, one_process=STREAM in (dataset, str(output)))
        model = load(sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
        predictions = model.predict(
            dataset_path(dataset, stdin_format),
            output=None if to_stdout else output,
            batch_size=batch_size,
            retry_errors=retry_errors,
            fresh=fresh,
            safe_csv=safe_csv,
            server=server,
        )
        if data is not None:
            print_rows(predictions, data)
    print_summary(predictions, as_json=as_json, to_stdout=to_stdout, quiet=quiet)
    if predictions.stats.rows and not predictions.stats.ok:
        raise typer.Exit(1)


def print_summary(predictions: "Predictions", *, as_json: bool, to_stdout: bool, quiet: bool) -> None:
    """Print numbers of the predictions.

    Args:
        predictions: The predictions.
        as_json: Whether to print JSON instead of a line.
        to_stdout: Whether standard output has the predictions; the line is then printed to standard error.
        quiet: Whether to leave out that line on standard error.
    """
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(asdict(predictions.stats) | {"path": str(predictions.path)}, indent=2))
    elif not to_stdout:
        print_wrapped(f"{predictions.stats}; written to {predictions.path}")
    elif not quiet:
        print_wrapped(str(predictions.stats), sys.stderr)
