"""A tree to a Config, or to all its mistakes at once.

What finds the mistakes is imported with the first of them: a file that is right is checked without it.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from partita_schema.config import Config
from partita_schema.errors import Problem
from partita_schema.tree import Node


@dataclass(frozen=True)
class Checked:
    """Either a configuration or problems."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_tree(root: Node) -> Checked:
    """The configuration that a tree holds, or every mistake in the order of the file."""
    try:
        return Checked(Config.model_validate(root.plain()), ())
    except ValidationError as error:
        from partita_schema.repair import problems_of

        return Checked(None, problems_of(root, error))
