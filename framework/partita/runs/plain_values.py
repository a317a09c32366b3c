"""Values that users record in a run, as values of JSON: numbers of numpy and tensors without dimensions are numbers."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from partita_schema.common.scalars import scalar
from partita_schema.errors import ConfigError, Problem, shortened


def plain_values(values: Mapping[str, Any], *, method: str) -> dict[str, Any]:
    """Return values that can be written as JSON.

    Args:
        values: What a trainer or a callback has passed.
        method: The method of the run that it was passed to, for the error.

    Raises:
        ConfigError: A value is none of JSON, and no number.
    """
    return {name: plain_value(value, name=str(name), method=method) for name, value in values.items()}


def plain_value(value: Any, *, name: str, method: str) -> Any:
    """Return a value that can be written as JSON; `name` says in errors where it is. Raises ConfigError."""
    value = scalar(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        return {key: plain_value(one, name=f"{name}.{key}", method=method) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one, name=f"{name}[{number}]", method=method) for number, one in enumerate(value)]
    message = (
        f"{method} got {shortened(repr(value))} as {name}, which cannot be written as JSON; write a number, a text, a "
        "list or a dictionary"
    )
    raise ConfigError([Problem("trainer.target", message)])
