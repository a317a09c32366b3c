"""manifest.json: what describes a run, read through one record."""

import json
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marshmallow import ValidationError

from partita_schema.errors import PartitaError
from partita_schema.records import FORMAT_VERSION, ManifestRecord
from partita_schema.sealed import DamagedError, unsealed

PACKAGES = ("partita", "torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "tokenizers", "numpy")

MANIFESTS = ("manifest.json", "partita.json")
"""What describes a run, and a model that was saved outside of one."""


def manifest_path(folder: Path) -> Path | None:
    """The file that describes a run or a saved model; None where there is none."""
    return next((folder / name for name in MANIFESTS if (folder / name).exists()), None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is written of a run or a saved model; {} where nothing is. Raises PartitaError where it cannot be read."""
    path = manifest_path(folder)
    if path is None:
        return {}
    try:
        written = unsealed(path.read_bytes())
    except DamagedError as error:
        advice = "restore it, or start a new run"
        if "checksum" in str(error):
            advice = "restore it, start a new run, or remove its key checksum if you changed it yourself"
        raise PartitaError(f"{path} {error}; {advice}") from None
    number = written.get("format_version")
    if isinstance(number, int) and number > FORMAT_VERSION:
        raise PartitaError(f"{path} was written by a newer partita (format {number}); update partita to read it")
    try:
        found: dict[str, Any] = ManifestRecord().load(written)
    except ValidationError as error:
        raise PartitaError(
            f"{path} is no manifest of partita's: {told(error)}; restore it or start a new run"
        ) from None
    return found


def told(error: ValidationError) -> str:
    """The reasons of marshmallow's error, by key."""
    reasons = error.messages if isinstance(error.messages, dict) else {"": error.messages}
    return "; ".join(f"{key}: {json.dumps(reason)}" for key, reason in reasons.items())


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    return datetime.fromtimestamp(time.time(), tz=UTC).isoformat(timespec="seconds")
