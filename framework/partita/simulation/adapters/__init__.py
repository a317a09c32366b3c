"""Programs that were written for others, as environments: what `interface` of a world says."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.simulation.adapters.gymnasium import GymnasiumEnvironment, creator, registered
from partita.simulation.adapters.tools import ToolEnvironment, Tools
from partita.simulation.contract import Environment, UnfitError
from partita.simulation.registry import ENVIRONMENTS
from partita_schema.errors import ConfigError, Problem
from partita_schema.simulation import EnvironmentWorldConfig
from partita_schema.target import is_target

KEY = "simulation.world.environment"


def load_environment(section: EnvironmentWorldConfig, *, folder: Path | None) -> tuple[Callable[..., Any], Any]:
    """What makes the program of a world of its options, and the code that it comes from.

    Raises ConfigError where there is none.
    """
    written = section.environment
    if section.interface == "gymnasium" and not is_target(written) and written not in ENVIRONMENTS.targets():
        return registered(written, key=KEY, folder=folder), creator(written)
    kind = ENVIRONMENTS.load(written, key=KEY, folder=folder)
    return kind, kind


def tools_of(kind: Any, *, interface: str) -> Mapping[str, Any]:
    """Descriptions of the tools of a class by name, as another process can be told; none of another interface.

    Raises ConfigError where it has no tools.
    """
    if interface != "tools":
        return {}
    try:
        return Tools.of(kind).descriptions
    except UnfitError as error:
        raise ConfigError([Problem(KEY, str(error))]) from error


def adapted(kind: Callable[..., Any], *, interface: str, tools: Mapping[str, Any]) -> Callable[..., Environment]:
    """What makes environments of options, of programs with this interface; `tools` are those of `tools_of`.

    It raises UnfitError where a program has another interface.
    """
    if interface == "partita":
        return kind
    known = Tools(tools)

    def make(**options: Any) -> Environment:
        program = kind(**options)
        return GymnasiumEnvironment(program) if interface == "gymnasium" else ToolEnvironment(program, known)

    make.__name__ = kind.__name__
    return make
