"""`partita validate`: check a configuration and summarize it."""

import sys
from typing import Annotated

import typer

from partita_schema.common.garbage_collection import no_garbage_collection
from partita_schema.errors import ConfigError


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Configuration files.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge the files, as the other commands do.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
) -> None:
    """Check configuration files without loading a model or data. All errors are reported at once, with their lines.

    Several files are checked one by one; with --merge, as one configuration in which later files win.
    """
    with no_garbage_collection():
        from partita_schema.config import summary
        from partita_schema.load import load_config

        failed = False
        for checked in [files] if merge else [[file] for file in files]:
            try:
                loaded = load_config(checked, overrides=overrides or ())
            except ConfigError as error:
                print(error, file=sys.stderr)
                failed = True
                continue
            for warning in loaded.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            print(f"{' '.join(checked)}: ok ({summary(loaded.config)})")
    if failed:
        raise typer.Exit(2)
