"""Places of classes from outside: `module:Class`."""

import re

from partita_schema.base import broken


def check_target(target: str) -> str:
    """The text, where it names a module and a class."""
    if not re.fullmatch(r"[\w.]+:\w+", target):
        raise broken(f"got {target!r}; write module:Class, such as my_package.parts:MyClass")
    return target
