"""`partita convert`: rewrite a Ludwig configuration with partita's keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.standard_streams import STREAM
from partita_schema.errors import DataError


def convert(
    file: Annotated[str, typer.Argument(metavar="LUDWIG.yaml", help="A Ludwig configuration with model_type: llm.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, or - for standard output. Default: -.")
    ] = None,
) -> None:
    """Convert a Ludwig configuration to partita's format. Unsupported keys are dropped and listed."""
    from partita_schema.dump import native_yaml
    from partita_schema.load import load_config

    loaded = load_config(file)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    text = native_yaml(loaded.config)
    if output is None or str(output) == STREAM:
        print(text, end="")
        return
    if output.exists():
        raise DataError(f"{output} exists; remove it or write another name after --output")
    if not output.parent.is_dir():
        raise DataError(f"{output} cannot be written: there is no folder {output.parent}")
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}")
