"""`partita schema`: the JSON schema for editors, or the configuration reference."""

from typing import Annotated

import typer


def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the configuration reference in Markdown instead.")
    ] = False,
) -> None:
    """Print the JSON schema of the configuration. Editors complete and check YAML with it."""
    from partita_schema import reference

    print(reference.markdown() if markdown else reference.json_schema_text(), end="")
