"""Load user classes for the data layer by `module:Class`."""

import inspect
from pathlib import Path
from typing import Any

from partita.data.rows import digest
from partita_trainers.registry import importable, load_class


def load_user_class(target: str, *, key: str, folder: Path | None) -> type:
    """Return the class at `module:Class`; the module may be in `folder`, the folder of the configuration file.

    Raises:
        ConfigError: At `key`, if there is no such class.
    """
    with importable(folder):
        return load_class(target, key=key)


def source_digest(target: Any) -> str:
    """Return a hash of the source file of a class or function."""
    path = inspect.getsourcefile(target)
    return digest(Path(path).read_bytes() if path is not None else f"{target.__module__}:{target.__qualname__}")
