"""Options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

MERGED = "several are merged, and later ones win"
Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE", help=f"The YAML configuration file; {MERGED}.", show_default=False),
]
FilesOrRun = Annotated[
    list[Path],
    typer.Argument(metavar="FILE_OR_RUN", help=f"A YAML file ({MERGED}), or a run directory.", show_default=False),
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, such as trainer.epochs=1."),
]
AnswerOverrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the file, such as generation.max_new_tokens=16."
    ),
]
SimulationOverrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, such as simulation.max_turns=4."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Batch size; overrides the file.", show_default=False)]
Context = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Maximum number of tokens of a prompt and its answer. Default: the model's, at most 8192.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result and errors, no progress or log.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def start_json_log(wanted: bool) -> None:
    """Write log, progress and errors as JSON lines, if `wanted`."""
    if wanted:
        from partita.runs.json_log import log_as_json

        log_as_json()


LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json",
        callback=start_json_log,
        is_eager=True,
        help="Write log, progress and errors to standard error as JSON lines.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that FILE_OR_RUN names, even if it is a run or a saved model by another author.",
    ),
]
