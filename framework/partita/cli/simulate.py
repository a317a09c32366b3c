"""`partita simulate`: episodes of the `simulation` section."""

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.loading import start_model
from partita.cli.options import AsJson, BatchSize, FilesOrRun, LogJson, Quiet, SimulationOverrides, TrustRemoteCode
from partita.cli.printing import print_metrics


def simulate(
    sources: FilesOrRun,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the transcripts. Default: in the run directory.", show_default=False)
    ] = None,
    batch_size: BatchSize = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier episodes and start over.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    overrides: SimulationOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_json: LogJson = False,
) -> None:
    """Roll out episodes with an environment, a dataset or a model. Rerun the same command to resume."""
    model = start_model(sources, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    report = model.simulate(output, batch_size=batch_size, fresh=fresh)
    if as_json:
        from partita.runs.files import strict_json

        print(strict_json(report.record(), indent=2))
    else:
        print_metrics(report.flat(), as_json=False, title="dialogues by history")
        print(f"transcripts in {report.folder}, to be read in its index.html")
    if report.all_failed:
        raise typer.Exit(1)
