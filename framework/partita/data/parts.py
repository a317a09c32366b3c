"""Parts of the data layer from outside, by `module:Class`."""

import inspect
from pathlib import Path
from typing import Any

from partita.data.rows import digest
from partita_trainers.registry import importable, load_class


def load_part(target: str, *, key: str, folder: Path | None) -> type:
    """The class at `module:Class`; a module of the user's may lie in `folder`, the folder of the file.

    Raises ConfigError at `key` where there is none.
    """
    with importable(folder):
        return load_class(target, key=key)


def source_digest(found: Any) -> str:
    """A hash of the text of the module that a class or function comes from."""
    place = inspect.getsourcefile(found)
    return digest(Path(place).read_bytes() if place is not None else f"{found.__module__}:{found.__qualname__}")
