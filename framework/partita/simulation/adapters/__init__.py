"""Programs that were written for others, as environments: what `interface` of a world says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.simulation.adapters.gymnasium import GymnasiumEnvironment, creator, registered
from partita.simulation.adapters.tools import ToolEnvironment, Tools
from partita.simulation.contract import Environment, UnfitError
from partita.simulation.registry import ENVIRONMENTS
from partita_schema.errors import ConfigError, Problem
from partita_schema.simulation import EnvironmentWorld
from partita_schema.target import is_target

KEY = "simulation.world.environment"


def load_environment(section: EnvironmentWorld, *, folder: Path | None) -> tuple[Callable[..., Any], Any]:
    """What makes the program of a world of its options, and the code that it comes from.

    Raises ConfigError where there is none.
    """
    written = section.environment
    if section.interface == "gymnasium" and not is_target(written) and written not in ENVIRONMENTS.targets():
        return registered(written, key=KEY, folder=folder), creator(written)
    kind = ENVIRONMENTS.load(written, key=KEY, folder=folder)
    return kind, kind


def adapted(make: Callable[[], Any], *, interface: str) -> Callable[[], Environment]:
    """What makes environments of programs with this interface; one is made to see that it can be.

    Raises ConfigError where it is another one.
    """
    try:
        if interface == "gymnasium":
            GymnasiumEnvironment(make()).close()
            return lambda: GymnasiumEnvironment(make())
        if interface == "tools":
            tools = Tools.of(make())
            return lambda: ToolEnvironment(make(), tools)
    except UnfitError as error:
        raise ConfigError([Problem(KEY, str(error))]) from error
    return make
