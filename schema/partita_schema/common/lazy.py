"""Packages whose public names are imported on first access, so that importing the package stays instant."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from partita_schema.common.garbage_collection import no_garbage_collection


def lazy_exports(
    package: str, names: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    `names` has the names to import from each module. `__dir__` lists `__all__` of the package.
    """
    modules = {name: module for module, exported in names.items() for name in exported}

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with no_garbage_collection():
            value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next access is an ordinary one
        return value

    def list_names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get_attribute, list_names
