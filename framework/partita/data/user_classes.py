"""Load user classes for the data layer by `module:Class`."""

import sys
from pathlib import Path
from typing import Any

from partita.data.rows import digest
from partita_trainers.user_modules import load_class, source_digests


def load_user_class(target: str, *, key: str, folder: Path | None) -> type:
    """Return the class at `module:Class`; the module may be in `folder`, the folder of the configuration file.

    Raises:
        ConfigError: At `key`, if there is no such class.
    """
    return load_class(target, key=key, folder=folder)


def source_digest(target: Any) -> str:
    """Return a hash of the source of a class or function, and of the modules that it imports from its folder."""
    module = sys.modules.get(target.__module__)
    digests = source_digests(module) if module is not None else []
    return digest(*(digests or [f"{target.__module__}:{target.__qualname__}"]))
