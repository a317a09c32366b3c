"""From what the file calls a program to its class: `module:Class`, a name of ours, or one that a package brings.

A package gives names to its classes in its metadata, as an entry point: nothing has to be imported to know them.

    [project.entry-points."partita.environments"]
    booking = "my_package.desk:Desk"
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeVar

from partita.data.parts import load_part
from partita_schema.errors import ConfigError, Problem
from partita_schema.nearest import nearest
from partita_schema.target import is_target

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Registry:
    """Names of classes of one kind."""

    kind: str
    """What a class of it is called, in the singular."""
    ours: Mapping[str, str] = field(default_factory=dict)
    """`module:Class` by name."""

    @property
    def group(self) -> str:
        """Of the entry points."""
        return f"partita.{self.kind}s"

    def targets(self) -> dict[str, str]:
        """`module:Class` of every name. A name of ours means the same whatever is installed."""
        return {point.name: point.value for point in entry_points(group=self.group)} | dict(self.ours)

    def load(self, written: str, *, key: str, folder: Path | None) -> type:
        """The class of what is written at `key`; its module may lie in `folder`.

        Raises ConfigError where there is none.
        """
        return load_part(self.target(written, key=key), key=key, folder=folder)

    def load_kind(self, written: str, base: type[Kind], *, key: str, folder: Path | None) -> type[Kind]:
        """The same, of a class that takes the place of one of ours. Raises ConfigError where it is no subclass."""
        found = self.load(written, key=key, folder=folder)
        if not issubclass(found, base):
            message = f"{found.__name__} is not a subclass of partita.simulation.{base.__name__}"
            raise ConfigError([Problem(key, message)])
        return found

    def target(self, written: str, *, key: str) -> str:
        """`module:Class` of what is written at `key`. Raises ConfigError where a name is not known."""
        if is_target(written):
            return written
        targets = self.targets()
        if written in targets:
            return targets[written]
        near = nearest(written, targets)
        known = f"one of {', '.join(sorted(targets))}, or " if targets else ""
        hint = f"did you mean {' or '.join(near)}?" if near else f"write {known}module:Class"
        raise ConfigError([Problem(key, f"no {self.kind} is named {written}; {hint}")])


ENVIRONMENTS = Registry("environment")
WORLDS = Registry("world")
AGENTS = Registry("agent")
CHECKERS = Registry(
    "checker",
    {
        "exact": "partita.simulation.checkers:Exact",
        "contains": "partita.simulation.checkers:Contains",
        "regex": "partita.simulation.checkers:Regex",
        "json_equal": "partita.simulation.checkers:JsonEqual",
    },
)
ROLLOUTS = Registry("rollout", {"slots": "partita.simulation.rollout:Rollout"})
TRANSCRIPTS = Registry("transcript", {"jsonl": "partita.simulation.transcripts:Transcripts"})
