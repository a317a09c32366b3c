"""Create objects of classes written by the user."""

from collections.abc import Callable, Mapping
from typing import Any

from partita.simulation.contract import described
from partita_schema.errors import ConfigError, Problem


def made(kind: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> Callable[[], Any]:
    """Return a function that creates objects of a class. Raises ConfigError if creating a first one fails."""
    try:
        kind(**options)
    except Exception as error:
        raise not_made(kind, options, described(error), key=key) from error
    return lambda: kind(**options)


def not_made(kind: Callable[..., Any], options: Mapping[str, Any], reason: str, *, key: str) -> ConfigError:
    """Return the error for a class that cannot be created with `options`."""
    name = getattr(kind, "__name__", str(kind))
    return ConfigError([Problem(key, f"{name} cannot be made with {dict(options)}: {reason}")])
