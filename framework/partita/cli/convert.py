"""`partita convert`: rewrite a configuration of another tool with partita's keys."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from partita.cli.standard_streams import STREAM, config_path
from partita_schema.errors import DataError

Source = Literal["ludwig", "axolotl", "llama_factory", "trl"]
"""Names after `--from`; a literal here, so that `--help` loads no schema."""


def convert(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A configuration of another tool, or - for standard input.", show_default=False
        ),
    ] = None,
    source: Annotated[
        Source, typer.Option("--from", metavar="TOOL", help="ludwig, axolotl, llama_factory or trl.")
    ] = "ludwig",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, or - for standard output. Default: -.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print what the keys of other tools become.")] = False,
) -> None:
    """Convert a configuration of another tool. What has no counterpart is listed."""
    if keys:
        from partita_schema.convert import keys_page

        print(keys_page(), end="")
        return
    if file is None:
        raise typer.BadParameter("write the file to convert", param_hint="FILE")
    file = config_path(file)
    path = None if output is None or str(output) == STREAM else output
    if path is not None:
        check_new(path)
    text = converted_ludwig(file) if source == "ludwig" else converted(file, source, path)
    if path is None:
        print(text, end="")
        return
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def check_new(path: Path) -> None:
    """Raise DataError if a file exists, or cannot be written because it has no folder."""
    if path.exists():
        raise DataError(f"{path} exists; remove it or write another name after --output")
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be written: there is no folder {path.parent}")


def converted_ludwig(file: Path) -> str:
    """Return a Ludwig file in partita's format, and print its warnings. Files of other tools are named in the error."""
    from partita_schema.dump import native_yaml
    from partita_schema.errors import ConfigError, Problem
    from partita_schema.load import load_config

    try:
        loaded = load_config(file)
    except ConfigError as error:
        from partita_schema.convert import likely_tool_of, nothing_to_convert
        from partita_schema.yaml.parse import EMPTY

        if error.problems[0].message == EMPTY:
            message = nothing_to_convert("Ludwig", "base_model")
            raise ConfigError([replace(error.problems[0], message=message)]) from None
        tool = likely_tool_of(file)
        if tool is None:
            raise
        message = f"is no file of Ludwig; it looks like a file for --from {tool}"
        raise ConfigError([Problem("", message, file=str(file))]) from error
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return native_yaml(loaded.config)


def converted(file: Path, tool: Literal["axolotl", "llama_factory", "trl"], output: Path | None) -> str:
    """Return a file of another tool in partita's format, and print what became of its keys."""
    from partita_schema.convert import convert_file, report_lines

    result = convert_file(file, tool, output=output.parent if output is not None else None)
    print(*report_lines(result.report), sep="\n", file=sys.stderr)
    return result.text
