"""Objects of user classes: how they are created, the errors of their code, and a hash of it."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partita.data.rows import digest
from partita_schema.common.text import describe_error
from partita_schema.errors import ConfigError, DataError, PartitaError, Problem, exit_call, raised_at
from partita_trainers.user_modules import check_arguments, source_digests


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


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Raise a DataError that names the user's class or function for any exception of its code, or `sys.exit`."""
    try:
        yield
    except PartitaError:
        raise
    except (Exception, SystemExit) as error:
        raise error_of(name, error) from error


def error_of(name: str, error: BaseException) -> DataError:
    """Return the error for an exception of a user's class or function, which is named."""
    if isinstance(error, SystemExit):
        return DataError(f"{name} called {exit_call(error)}{raised_at(error)}; raise an exception instead")
    return DataError(f"{name} raised {describe_error(error)}{raised_at(error)}")


def source_digest(target: Any) -> str:
    """Return a hash of the source of a class or function, and of the modules that it imports from its folder."""
    module = sys.modules.get(target.__module__)
    digests = source_digests(module) if module is not None else []
    return digest(*(digests or [f"{target.__module__}:{target.__qualname__}"]))
