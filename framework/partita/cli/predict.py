"""`partita predict`: answers for every row of a data set, in its order."""

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import (
    AsJson,
    BatchSize,
    FileOrRun,
    Overrides,
    Quiet,
    TrustRemoteCode,
    print_wrapped,
    start_model,
)
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path, print_rows, stdout_for_data


def predict(
    source: FileOrRun,
    dataset: Annotated[
        str,
        typer.Option(help="Rows to answer: a file, a glob, a Hub id, or - for standard input.", show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Where predictions go: .jsonl, .csv or .parquet, or - for JSON lines on standard output.",
            show_default=False,
        ),
    ],
    stdin_format: StdinFormat = "jsonl",
    batch_size: BatchSize = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that ended in an error.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of continuing.")] = False,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="Mark cells of a .csv that a spreadsheet would run as a formula.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Answer every row of a data set. Started again it continues where it was."""
    to_stdout = str(output) == STREAM
    if to_stdout and as_json:
        raise typer.BadParameter("standard output has the predictions with --output -; leave --json out")
    with stdout_for_data() if to_stdout else nullcontext() as data:
        model = start_model(
            source,
            overrides=overrides,
            quiet=quiet,
            trust_remote_code=trust_remote_code,
            one_process=STREAM in (dataset, str(output)),
        )
        found = model.predict(
            dataset_path(dataset, stdin_format),
            output=None if to_stdout else output,
            batch_size=batch_size,
            retry_errors=retry_errors,
            fresh=fresh,
            safe_csv=safe_csv,
        )
        if data is not None:
            print_rows(found, data)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(asdict(found.stats) | {"path": str(found.path)}, indent=2))
    elif not to_stdout:
        print_wrapped(f"{found.stats}; written to {found.path}")
    elif not quiet:
        print_wrapped(str(found.stats), sys.stderr)
