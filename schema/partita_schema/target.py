"""Places of classes from outside: `module:Class`, or a name that a package has given to one."""

import re

from partita_schema.base import broken

NAME = re.compile(r"[A-Za-z][\w-]*")
"""A name that a package gives to a class of its own."""


def check_target(target: str) -> str:
    """The text, where it names a module and a class."""
    if not is_target(target):
        raise broken(f"got {target!r}; write module:Class, such as my_package.parts:MyClass")
    return target


def check_part(target: str, *, at: str = "") -> str:
    """The text, where it names a module and a class, or is a name; `at` is where it stands below the model."""
    if not is_target(target) and not NAME.fullmatch(target):
        raise broken(f"got {target!r}; write module:Class, such as my_package.parts:MyClass, or a name", at=at)
    return target


def is_target(target: str) -> bool:
    """Whether it is `module:Class`."""
    return re.fullmatch(r"[\w.]+:\w+", target) is not None
