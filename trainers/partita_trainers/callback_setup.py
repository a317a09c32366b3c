"""Callbacks of a configuration or a caller: their construction, and checks before the training."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path

from partita_schema.common.text import describe_error, nearest
from partita_schema.errors import ConfigError, Problem, shortened
from partita_schema.sections.callbacks import CallbackConfig
from partita_trainers.base import Trainer
from partita_trainers.callbacks import HOOKS, hooks_of, name_of
from partita_trainers.user_modules import check_arguments, importable, load_class

logger = logging.getLogger(__name__)


def build_callbacks(sections: Sequence[CallbackConfig], *, folder: Path | None = None) -> list[object]:
    """Build the callbacks of a configuration as `Class(**options)`.

    Raises:
        ConfigError: A module or class does not exist, does not take the options, or has no method that is called.
    """
    callbacks: list[object] = []
    for number, kind in enumerate(callback_classes(sections, folder=folder)):
        options = sections[number].options
        try:
            with importable(folder):
                callback = kind(**options)
        except Exception as error:
            message = f"{kind.__name__} cannot be created with {options}: {describe_error(error)}"
            raise ConfigError([Problem(f"callbacks[{number}]", message)]) from error
        check_callback(callback, key=f"callbacks[{number}].target")
        callbacks.append(callback)
    return callbacks


def callback_classes(sections: Sequence[CallbackConfig], *, folder: Path | None = None) -> list[type]:
    """Return the classes of the callbacks of a configuration, without creating objects.

    Raises:
        ConfigError: A module or class does not exist, or does not take the options.
    """
    kinds = [
        load_class(section.target, key=f"callbacks[{number}].target", folder=folder)
        for number, section in enumerate(sections)
    ]
    for number, (kind, section) in enumerate(zip(kinds, sections, strict=True)):
        try:
            check_arguments(kind, **section.options)
        except TypeError as error:
            message = f"{kind.__name__} cannot be created with these keyword arguments: {error}"
            raise ConfigError([Problem(f"callbacks[{number}].options", message)]) from None
    return kinds


def check_callbacks(callbacks: object) -> Sequence[object]:
    """Return the callbacks that a caller has passed.

    Raises:
        ConfigError: They are not a list of objects with the methods of `Callback`.
    """
    if not isinstance(callbacks, list | tuple):
        message = f"got {shortened(repr(callbacks))}; write a list of callbacks"
        raise ConfigError([Problem("callbacks", message)])
    for number, callback in enumerate(callbacks):
        check_callback(callback, key=f"callbacks[{number}]")
    return callbacks


def check_callback(callback: object, *, key: str) -> None:
    """Raise ConfigError for the key if an object has no method of `Callback`, or one that takes something else."""
    if isinstance(callback, type):
        raise ConfigError([Problem(key, f"{callback.__name__} is a class; write {callback.__name__}()")])
    name, methods = name_of(callback), hooks_of(callback)
    others = [other for other in dir(callback) if other.startswith("on_") and other not in HOOKS]
    if not methods:
        near = [hook for other in others for hook in nearest(other, HOOKS)]
        hint = f"did you mean {near[0]}?" if near else f"define {', '.join(HOOKS[:-1])} or {HOOKS[-1]}"
        raise ConfigError([Problem(key, f"{name} has no method that is called during training; {hint}")])
    for hook, method in methods.items():
        if inspect.iscoroutinefunction(method):
            raise ConfigError(
                [Problem(key, f"{name}.{hook} is async and would never run; write def {hook}(self, state)")]
            )
        try:
            inspect.signature(method).bind(None)
        except ValueError:  # a function of C that does not say what it takes
            continue
        except TypeError as error:
            message = f"{name}.{hook} cannot be called with the state as its only argument: {error}"
            raise ConfigError([Problem(key, f"{message}; write def {hook}(self, state)")]) from None
    for other in others:
        logger.warning("%s: %s.%s is never called; the methods are %s", key, name, other, ", ".join(HOOKS))


def check_calls_callbacks(trainer: Trainer) -> None:
    """Raise ConfigError if a trainer calls no callbacks."""
    if not getattr(trainer, "calls_callbacks", False):
        name = type(trainer).__name__
        message = (
            f"{name} does not call them: let it call partita_trainers.Callbacks and say so in the class by "
            "calls_callbacks = True, or remove them"
        )
        raise ConfigError([Problem("callbacks", message)])
