"""`partita schema`: the JSON schema for editors, or the reference of all keys."""

from typing import Annotated

import typer


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference of all keys instead.")] = False,
) -> None:
    """Print the JSON schema of the configuration, for editors that complete and check YAML."""
    from partita_schema import reference

    print(reference.markdown() if markdown else reference.json_schema_text(), end="")
