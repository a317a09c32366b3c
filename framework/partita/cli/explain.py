"""`partita explain`: every value of a configuration, and where it comes from."""

import json
import sys
from typing import Annotated

import typer

from partita_schema.dump import resolved_yaml
from partita_schema.load import load_config


def explain(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A configuration file.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: config, origins, warnings.")] = False,
) -> None:
    """Print the whole configuration with the origin of every value: line, default, --set, a key of Ludwig's."""
    loaded = load_config(file, overrides=overrides or ())
    if as_json:
        shown = {
            "file": loaded.file,
            "config": loaded.config.model_dump(mode="json"),
            "origins": dict(loaded.origins),
            "warnings": [str(warning) for warning in loaded.warnings],
        }
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(resolved_yaml(loaded), end="")
