"""`partita evaluate`: metrics of a model on a data set."""

from typing import Annotated

import typer

from partita.cli.options import AsJson, BatchSize, FileOrRun, Overrides, Quiet, print_metrics, start_model


def evaluate(
    source: FileOrRun,
    dataset: Annotated[
        str | None, typer.Option(help="Rows with the right answers. Default: the file's test rows.", show_default=False)
    ] = None,
    batch_size: BatchSize = None,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Answer the rows of a data set and compare with the right answers."""
    scores = start_model(source, overrides=overrides, quiet=quiet).evaluate(dataset, batch_size=batch_size)
    print_metrics(scores, as_json=as_json, title="metrics by output")
