"""Create objects of user classes for the data layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from partita.data.sources.python_datasets import errors_of
from partita_schema.errors import ConfigError, Problem
from partita_trainers.registry import check_arguments


def make_user_object(
    user_class: type,
    target: str,
    *,
    key: str,
    signature: str,
    arguments: Sequence[object] = (),
    options: Mapping[str, object] | None = None,
) -> Any:
    """Return a new object of a user's class.

    Args:
        user_class: The class.
        target: `module:Class`, for messages.
        key: The key that names it.
        signature: How its `__init__` is written.
        arguments: Positional arguments.
        options: Keyword arguments.

    Raises:
        ConfigError: The class does not take the arguments.
        DataError: It has raised an exception.
    """
    keywords = options or {}
    try:
        check_arguments(user_class, *arguments, **keywords)
    except TypeError as error:
        message = f"{target} cannot be created: {error}; write {signature}"
        raise ConfigError([Problem(key, message)]) from None
    with errors_of(f"{key}: {target}"):
        return user_class(*arguments, **keywords)
