"""Adapt programs written for other libraries, selected by `interface` of a world, to environments."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.simulation.adapters.gymnasium import GymnasiumEnvironment, creator, find_environment
from partita.simulation.adapters.tools import ToolEnvironment, Tools
from partita.simulation.contract import Environment, InterfaceError
from partita.simulation.registry import ENVIRONMENTS
from partita_schema.base import is_target
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.simulation import EnvironmentWorldConfig

KEY = "simulation.world.environment"


def load_environment(section: EnvironmentWorldConfig, *, folder: Path | None) -> tuple[Callable[..., Any], Any]:
    """Return a function that creates the program of a world, and the class or function to hash as its source.

    Raises ConfigError if it cannot be loaded.
    """
    written = section.environment
    if section.interface == "gymnasium" and not is_target(written) and written not in ENVIRONMENTS.targets():
        return find_environment(written, key=KEY, folder=folder), creator(written)
    kind = ENVIRONMENTS.load(written, key=KEY, folder=folder)
    return kind, kind


def tools_of(kind: Any, *, interface: str) -> Mapping[str, Any]:
    """Return the tool descriptions of a class by name, serializable to JSON; empty for another interface.

    Raises ConfigError if the class has no tools.
    """
    if interface != "tools":
        return {}
    try:
        return Tools.of(kind).descriptions
    except InterfaceError as error:
        raise ConfigError([Problem(KEY, str(error))]) from error


def adapt(kind: Callable[..., Any], *, interface: str, tools: Mapping[str, Any]) -> Callable[..., Environment]:
    """Return a function that creates a program from options and adapts it to `Environment`.

    `tools` is the result of `tools_of`. The returned function raises InterfaceError if the program has another one.
    """
    if interface == "partita":
        return kind
    known = Tools(tools)

    def make(**options: Any) -> Environment:
        program = kind(**options)
        return GymnasiumEnvironment(program) if interface == "gymnasium" else ToolEnvironment(program, known)

    make.__name__ = kind.__name__
    return make
