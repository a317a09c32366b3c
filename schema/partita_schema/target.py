"""References to classes outside partita: `module:Class`, or a name registered by an installed package."""

import re

from partita_schema.base import rule_error

NAME = re.compile(r"[A-Za-z][\w-]*")
"""A name that a package registers for one of its classes."""


def check_target(target: str) -> str:
    """Return the text if it is `module:Class`; otherwise raise a rule error."""
    if not is_target(target):
        raise rule_error(f"got {target!r}; write module:Class, such as my_package.parts:MyClass")
    return target


def check_part(target: str, *, at: str = "") -> str:
    """Return the text if it is `module:Class` or a name; otherwise raise a rule error for the key `at`."""
    if not is_target(target) and not NAME.fullmatch(target):
        raise rule_error(f"got {target!r}; write module:Class, such as my_package.parts:MyClass, or a name", at=at)
    return target


def is_target(target: str) -> bool:
    """Return whether the text is `module:Class`."""
    return re.fullmatch(r"[\w.]+:\w+", target) is not None
