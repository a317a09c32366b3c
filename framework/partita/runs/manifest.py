"""manifest.json, the description of a run or a saved model."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marshmallow import ValidationError

from partita.runs.locks import is_locked
from partita_schema.common.checksums import DamagedError, unsealed
from partita_schema.common.text import nearest
from partita_schema.errors import PartitaError
from partita_schema.records import FORMAT_VERSION, ManifestRecord

PACKAGES = ("partita", "torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "tokenizers", "numpy")

RUNS = Path("runs")
"""Default parent of run directories."""
MANIFESTS = ("manifest.json", "partita.json")
"""Names of the description: of a run, and of a model saved outside of one."""
MAX_LISTED = 8
"""How many runs an error lists."""
RUNS_WITHIN = (f"*/{MANIFESTS[0]}", f"*/*/{MANIFESTS[0]}")
"""Manifests of the runs in the folder of a cross-validation or of a sweep, as glob patterns."""
MODEL_BEFORE_TRAINING = "model_before_training"
"""Key with a hash of what the weights before training were loaded from."""


def manifest_path(folder: Path) -> Path | None:
    """Return the path of the manifest of a run or a saved model; None if there is none."""
    return next((folder / name for name in MANIFESTS if (folder / name).exists()), None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run or a saved model; {} if there is none. Raise PartitaError if it is damaged."""
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
        manifest: dict[str, Any] = ManifestRecord().load(written)
    except ValidationError as error:
        raise PartitaError(
            f"{path} is not a partita manifest: {reasons_of(error)}; restore it or start a new run"
        ) from None
    return manifest


def reasons_of(error: ValidationError) -> str:
    """Format the reasons of a marshmallow error, by key."""
    reasons = error.messages if isinstance(error.messages, dict) else {"": error.messages}
    return "; ".join(f"{key}: {json.dumps(reason)}" for key, reason in reasons.items())


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def now() -> str:
    """Return the time in UTC, in ISO format to the second."""
    return datetime.fromtimestamp(time.time(), tz=UTC).isoformat(timespec="seconds")


def sibling_runs(folder: Path) -> str:
    """Return the runs next to a path that is not a run, the newest first, as `; there are a (done), b (failed)`.

    Names similar to that of the path come first. Of a folder with runs in it, such as that of a sweep, return those.
    Empty if there are no runs.
    """
    within = runs_within(folder)
    if within:
        return f"; it holds the runs {listing_of(within)}"
    runs = [path for path in (folder.parent.iterdir() if folder.parent.is_dir() else ()) if read_status(path)]
    known = sorted(runs, key=lambda path: (path / MANIFESTS[0]).stat().st_mtime)[::-1]
    if not known:
        return ""
    near = nearest(folder.name, [path.name for path in known])
    hint = f"; did you mean {' or '.join(str(folder.parent / name) for name in near)}?" if near else ""
    return f"{hint} There are {listing_of(known)}" if hint else f"; there are {listing_of(known)}"


def runs_within(folder: Path) -> list[Path]:
    """Return the readable runs in a folder, such as that of a cross-validation or of a sweep."""
    found = [path.parent for pattern in RUNS_WITHIN for path in folder.glob(pattern)]
    return sorted(path for path in found if read_status(path))


def listing_of(runs: Sequence[Path]) -> str:
    """Return the first `MAX_LISTED` runs with their statuses."""
    more = f" and {len(runs) - MAX_LISTED:,} more" if len(runs) > MAX_LISTED else ""
    return ", ".join(f"{path} ({read_status(path)})" for path in runs[:MAX_LISTED]) + more


def read_status(folder: Path) -> str | None:
    """Return the status of the run in a folder, as `partita runs` lists it; None if there is no readable one."""
    try:
        status = read_manifest(folder).get("status") if (folder / MANIFESTS[0]).is_file() else None
    except (PartitaError, OSError):
        return None
    if not status:
        return None
    return str(status) if status != "running" or is_locked(folder) else "dead"
