"""`partita predict`: answers for every row of a data set, in its order."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options import AsJson, BatchSize, FileOrRun, Overrides, Quiet, start_model


def predict(
    source: FileOrRun,
    dataset: Annotated[str, typer.Option(help="Rows to answer: a file, a glob or a Hub id.", show_default=False)],
    output: Annotated[Path, typer.Option(help="Where predictions go: .jsonl, .csv or .parquet.", show_default=False)],
    batch_size: BatchSize = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Do rows again that ended in an error.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of continuing.")] = False,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="Mark cells of a .csv that a spreadsheet would run as a formula.")
    ] = False,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Answer every row of a data set. Started again it continues where it was."""
    model = start_model(source, overrides=overrides, quiet=quiet)
    found = model.predict(
        dataset, output=output, batch_size=batch_size, retry_errors=retry_errors, fresh=fresh, safe_csv=safe_csv
    )
    stats = found.stats
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(asdict(stats) | {"path": str(found.path)}, indent=2))
        return
    print(f"{stats}; written to {found.path}")
