"""`partita push`: upload a model with its page to the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.loading import open_model
from partita.cli.options import AnswerOverrides, LogJson, Quiet, TrustRemoteCode


def push(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE_OR_RUN", help="A YAML file, or a run directory.", show_default=False),
    ],
    repository: Annotated[
        str,
        typer.Argument(metavar="REPOSITORY", help="On the Hub, such as somebody/tickets.", show_default=False),
    ],
    private: Annotated[bool, typer.Option("--private/--public", help="Who sees a new repository.")] = True,
    dry_run: Annotated[
        Path | None,
        typer.Option("--dry-run", help="Write what would be uploaded to this folder.", show_default=False),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    overrides: AnswerOverrides = [],  # noqa: B006 -- typer reads the default and never changes it
    quiet: Quiet = False,
    log_json: LogJson = False,
) -> None:
    """Upload a model with a model card to the Hub."""
    model = open_model([source], overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    print(model.push_to_hub(repository, private=private, dry_run=dry_run))
