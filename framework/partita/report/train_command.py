"""The command that trains the file of a run, with the values that the run was started with."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.runs.origin import data_options
from partita.runs.settings import leaves
from partita_schema.errors import PartitaError
from partita_schema.load import load_config

HEAD_KEY = re.compile(r"output_features\.\d+\.head")


def train_command(folder: Path, manifest: Mapping[str, Any], *, to: Path) -> list[str] | None:
    """Return the words of the command that trains the file of a run; None if the file is gone or has changed.

    Args:
        folder: The run directory.
        manifest: What the run has recorded.
        to: The run directory of the command: the same one to continue the run, another one to repeat it.
    """
    file = original_file(folder, manifest)
    changes = None if file is None else overrides_of(manifest, file)
    if file is not None and changes is not None:
        return ["partita", "train", str(file), "--run", str(to), *data_options(manifest), *changes]
    command = shlex.split(manifest.get("command") or "")
    if command[:2] == ["partita", "train"]:
        return [*without_run(command), "--run", str(to)]
    return None


def without_run(command: Sequence[str]) -> list[str]:
    """Return the words of a command without the option `--run` and its value."""
    after = {index + 1 for index, word in enumerate(command) if word == "--run"}
    return [
        word
        for index, word in enumerate(command)
        if index not in after and word != "--run" and not word.startswith("--run=")
    ]


def overrides_of(manifest: Mapping[str, Any], file: Path) -> list[str] | None:
    """Return the options `--set` with which a run was started from a file; None if they cannot be written so."""
    try:
        written = leaves(load_config(file).config.model_dump(mode="json"))
    except PartitaError:
        return None
    recorded = leaves(manifest.get("config") or {})
    changed = [key for key in recorded if recorded[key] != written.get(key)]
    changed = [key for key in changed if not HEAD_KEY.fullmatch(key)]  # written when a run starts: `with_heads`
    if any(isinstance(recorded[key], dict | list) for key in changed):
        return None
    return [word for key in changed for word in ("--set", f"{key}={json.dumps(recorded[key])}")]


def original_file(folder: Path, manifest: Mapping[str, Any]) -> Path | None:
    """Return the file that a run was started with; None if there is none with this text any more."""
    origin, copy = Path(manifest.get("folder") or "."), folder / "config.yaml"
    try:
        text = copy.read_bytes()
        candidates = [path for suffix in ("*.yaml", "*.yml") for path in sorted(origin.glob(suffix))]
        found = next(path for path in candidates if path.stat().st_size == len(text) and path.read_bytes() == text)
    except (OSError, StopIteration):
        return None
    return found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found
