"""`partita convert`: a file of Ludwig's in this format's own keys."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.standard_streams import STREAM
from partita_schema.errors import DataError


def convert(
    file: Annotated[str, typer.Argument(metavar="LUDWIG.yaml", help="A file with model_type: llm.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default, or -: print.")] = None,
) -> None:
    """Write a Ludwig file in partita's own form; what has no effect here is left out and told."""
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
