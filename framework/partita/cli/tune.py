"""`partita tune`: measure which batch sizes fit and how fast they are."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.loading import start_model
from partita.cli.options import AsJson, FilesOrRun, LogJson, Overrides, Quiet, TrustRemoteCode
from partita.cli.standard_streams import STREAM, StdinFormat, dataset_path


def tune(
    sources: FilesOrRun,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Rows to measure with, or - for standard input. Default: the file's data.", show_default=False
        ),
    ] = None,
    stdin_format: StdinFormat = "jsonl",
    plot: Annotated[
        Path | None,
        typer.Option(help="Plot to write: .png, .svg, or .html with tables.", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached measurements and measure again.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    overrides: Overrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Measure which batch sizes fit the device and how fast they are. Trains and predicts nothing."""
    if plot is not None:
        from partita.report.tuning_plot import check_plot, write_plot

        # checked before minutes of measuring
        check_plot(plot)
    model = start_model(
        sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code, one_process=dataset == STREAM
    )
    sizes = model.tune(dataset_path(dataset, stdin_format), fresh=fresh).by_purpose()
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json({purpose: size.record() for purpose, size in sizes.items()}, indent=2))
    else:
        from rich.console import Console

        from partita.report.batch_size_charts import print_sizes

        print_sizes(sizes, Console(file=sys.stdout, markup=False))
    if plot is not None:
        write_plot(plot, sizes, title=f"Batch sizes of {' '.join(map(str, sources))}")
        if not as_json:
            print(f"\ndrawn in {plot}")
