"""The check of a tree: its configuration, or every problem."""

from dataclasses import dataclass

from pydantic import ValidationError

from partita_schema.config import FINISHED, Config
from partita_schema.errors import Problem
from partita_schema.yaml.tree import Node


@dataclass(frozen=True)
class Checked:
    """The result of a check: a configuration, or problems."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_tree(root: Node, *, finished: bool = False) -> Checked:
    """Return the configuration of a tree, or every problem in file order.

    Args:
        root: The tree.
        finished: Whether it is the file of a finished run.
    """
    try:
        return Checked(Config.model_validate(root.plain(), context=FINISHED if finished else None), ())
    except ValidationError as error:
        from partita_schema.problems.repair import problems_of

        return Checked(None, problems_of(root, error, finished=finished))
