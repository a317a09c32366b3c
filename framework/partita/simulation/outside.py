"""Objects of classes from outside."""

from collections.abc import Callable, Mapping
from typing import Any

from partita.simulation.contract import described
from partita_schema.errors import ConfigError, Problem


def made(kind: Callable[..., Any], options: Mapping[str, Any], *, key: str) -> Callable[[], Any]:
    """What makes objects of a class from outside; one is made to see that it can be. Raises ConfigError."""
    try:
        kind(**options)
    except Exception as error:
        raise not_made(kind, options, described(error), key=key) from error
    return lambda: kind(**options)


def not_made(kind: Callable[..., Any], options: Mapping[str, Any], reason: str, *, key: str) -> ConfigError:
    """Why there are no objects of a class."""
    name = getattr(kind, "__name__", str(kind))
    return ConfigError([Problem(key, f"{name} cannot be made with {dict(options)}: {reason}")])
