"""Validate a tree of YAML nodes: return a Config, or raise all problems at once.

The code that finds and explains problems is imported only when there is one, so a valid file is checked faster.
"""

from dataclasses import dataclass

from pydantic import ValidationError

from partita_schema.config import Config
from partita_schema.errors import Problem
from partita_schema.tree import Node


@dataclass(frozen=True)
class Checked:
    """The result of a check: a configuration, or problems."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_tree(root: Node) -> Checked:
    """Return the configuration of a tree, or every problem in file order."""
    try:
        return Checked(Config.model_validate(root.plain()), ())
    except ValidationError as error:
        from partita_schema.repair import problems_of

        return Checked(None, problems_of(root, error))
