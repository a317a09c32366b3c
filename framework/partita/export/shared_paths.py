"""Names in place of the paths of this machine, in the files of a model that others load."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.runs.manifest import MANIFESTS
from partita.tokenizers.saved_adapters import RecordedBase
from partita_schema.common.checksums import sealed, unsealed
from partita_schema.common.files import write_atomically
from partita_schema.yaml.relative_paths import FILES, FOLDERS
from partita_trainers.checkpoints.file_sums import FILE as SUMS
from partita_trainers.checkpoints.file_sums import read_sums, write_sums

IN_CACHE = re.compile(r"/models--([^/]+?)(?:--([^/]+))?/snapshots/[^/]+/?$")
"""Matches the folder of a model in the cache of the Hub."""
KEYS = tuple(tuple(pattern.split(".")) for pattern in (*FILES, *FOLDERS))
"""Keys of the configuration with paths; `*` is any key or index."""


def shared_name(path: str) -> str:
    """Return the Hub id of a folder in the cache of the Hub, else the name of a file or folder."""
    cached = IN_CACHE.search(path)
    return "/".join(filter(None, cached.groups())) if cached else Path(path).name


def without_local_paths(folder: Path) -> None:
    """Replace the absolute paths in `partita.json`, `adapter_config.json` and `partita-base.json` by names.

    The checksums are written again.
    """
    card = folder / MANIFESTS[1]
    content = unsealed(card.read_bytes())
    content["config"] = replaced(content["config"], shared_name)
    write_atomically(card, json.dumps(sealed(content), indent=2) + "\n")
    described = folder / "adapter_config.json"
    adapter = json.loads(described.read_text(encoding="utf8")) if described.is_file() else {}
    if not is_absolute(adapter.get("base_model_name_or_path")):
        return
    sums, recorded = read_sums(folder), RecordedBase.read(folder)
    path = adapter["base_model_name_or_path"]
    adapter["base_model_name_or_path"] = shared_name(path)
    described.write_text(json.dumps(adapter, indent=2, sort_keys=True), encoding="utf8")
    if recorded is not None:
        is_in_cache = IN_CACHE.search(path) is not None  # its Hub id replaces the folder
        name = replaced(recorded.base_model, shared_name, at=("base_model",))
        replace(recorded, base_model=name, weights=None if is_in_cache else recorded.weights).write(folder)
    if sums is not None:
        (folder / SUMS).unlink()
        write_sums(folder, files=[folder / name for name in sums])


def replaced(value: Any, name: Callable[[str], str], *, at: Sequence[str] = ()) -> Any:
    """Return a configuration with names in place of its absolute paths.

    These are the values of keys of paths, and other values if there is such a file, as a text may begin with a slash.
    """
    if isinstance(value, dict):
        return {key: replaced(one, name, at=(*at, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one, name, at=(*at, "*")) for one in value]
    if not is_absolute(value):
        return value
    is_path = any(len(key) == len(at) and all(a in ("*", b) for a, b in zip(key, at, strict=True)) for key in KEYS)
    return name(value) if is_path or exists(value) else value


def is_absolute(value: Any) -> bool:
    """Return whether a value is an absolute path of more than one part."""
    return isinstance(value, str) and value.startswith(("/", "~/")) and "\n" not in value and len(Path(value).parts) > 2


def exists(path: str) -> bool:
    """Return whether there is such a file."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError):  # a name that is too long, or holds a null
        return False
