"""`partita validate`: is the file right, and what does it describe?"""

import sys
from typing import Annotated

import typer

from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.summary import summary


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Configuration files.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
) -> None:
    """Check files without loading a model or data; tell every mistake with its line."""
    failed = False
    for file in files:
        try:
            loaded = load_config(file, overrides=overrides or ())
        except ConfigError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for warning in loaded.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"{file}: ok ({summary(loaded.config)})")
    if failed:
        raise typer.Exit(2)
