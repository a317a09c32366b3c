"""Resolve the name of a program to its class (`module:Class`, a built-in name, or an entry point), and create it.

Packages register names as entry points in their metadata, so names are listed without importing anything:

    [project.entry-points."partita.environments"]
    booking = "my_package.desk:Desk"
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from partita.simulation.contract import describe_program_error
from partita_schema.base import is_target
from partita_schema.common.text import nearest
from partita_schema.errors import ConfigError, Problem
from partita_trainers.user_modules import load_class

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Registry:
    """The names of one kind of program."""

    kind: str
    """Name of the kind, in the singular."""
    built_in: Mapping[str, str] = field(default_factory=dict)
    """Built-in programs: `module:Class` by name."""
    others: Sequence[str] = ()
    """Further names that a file may have, which are no programs; errors name them too."""

    @property
    def group(self) -> str:
        """Group of the entry points."""
        return f"partita.{self.kind}s"

    def targets(self) -> dict[str, str]:
        """Return `module:Class` of every name. Built-in names take precedence over entry points."""
        return {point.name: point.value for point in entry_points(group=self.group)} | dict(self.built_in)

    def load(self, written: str, *, key: str, folder: Path | None) -> type:
        """Return the class written at `key`; its module is also searched in `folder`.

        Raises ConfigError if the class cannot be loaded.
        """
        return load_class(self.target(written, key=key), key=key, folder=folder)

    def load_kind(self, written: str, base: type[Kind], *, key: str, folder: Path | None) -> type[Kind]:
        """Load a class that replaces a built-in one.

        Args:
            written: Name or `module:Class`.
            base: Class that it must inherit from.
            key: Key of the configuration, for errors.
            folder: Folder in which its module is also searched.

        Raises:
            ConfigError: The class cannot be loaded or is not a subclass of `base`.
        """
        kind = self.load(written, key=key, folder=folder)
        if not issubclass(kind, base):
            message = f"{kind.__name__} is not a subclass of partita.simulation.{base.__name__}"
            raise ConfigError([Problem(key, message)])
        return kind

    def target(self, written: str, *, key: str) -> str:
        """Resolve a name to `module:Class`. Raises ConfigError if the name is unknown."""
        if is_target(written):
            return written
        targets = self.targets()
        if written in targets:
            return targets[written]
        names = sorted({*targets, *self.others})
        near = nearest(written, names)
        known = f"one of {', '.join(names)}, or " if names else ""
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
    others=("reward",),
)
ROLLOUTS = Registry("rollout", {"slots": "partita.simulation.rollout:Rollout"})
TRANSCRIPTS = Registry("transcript", {"jsonl": "partita.simulation.transcripts:Transcripts"})


def factory(kind: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> Callable[[], Any]:
    """Return a function that creates objects of a class. Raises ConfigError if creating a first one fails."""
    try:
        kind(**options)
    except Exception as error:
        raise creation_error(kind, options, describe_program_error(error), key=key) from error
    return lambda: kind(**options)


def creation_error(kind: Callable[..., Any], options: Mapping[str, Any], reason: str, *, key: str) -> ConfigError:
    """Return the error for a class that cannot be created.

    Args:
        kind: The class.
        options: Options of the configuration that it was called with.
        reason: Why it cannot be created.
        key: Key of the configuration, for the error.
    """
    name = getattr(kind, "__name__", str(kind))
    return ConfigError([Problem(key, f"{name} cannot be created with {dict(options)}: {reason}")])
