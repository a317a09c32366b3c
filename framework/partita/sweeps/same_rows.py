"""Whether the rows of a sweep are still those that its trials were trained on."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.data.run_data import open_run_data
from partita.runs.manifest import read_manifest
from partita.runs.sweep_record import TRIALS
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import DataError, ResumeError
from partita_schema.load import load_config

logger = logging.getLogger(__name__)

SOURCES = ("source", "mix", "validation", "test")
"""Keys of `data` that name rows."""


def check_same_rows(folder: Path, *, origin: Path, dataset: Any, finished: bool) -> None:
    """Compare the rows that trials have recorded with those of today, once for each combination of sources.

    Args:
        folder: Folder of the sweep.
        origin: Folder that relative paths of the configuration are resolved against.
        dataset: Replaces data.source, or None.
        finished: Whether all trials have ended. Rows that cannot be read any more are then a warning.

    Raises:
        ResumeError: Rows have changed.
        DataError: They cannot be read.
    """
    for run, config, recorded in recorded_rows(folder):
        try:
            present = open_run_data(config, folder=origin, dataset=dataset).record()
        except DataError as error:
            if not finished:
                raise
            logger.warning("the rows of the trials cannot be read any more, and are not compared: %s", error)
            return
        for split in dict.fromkeys((*recorded, *present)):
            old, new = recorded.get(split), present.get(split)
            if old is None or new is None or old["fingerprint"] != new["fingerprint"]:
                raise ResumeError(
                    f"the {split} rows have changed since {run} was trained: {size_of(old)} then, {size_of(new)} now"
                    f"{' with other content' if size_of(old) == size_of(new) else ''}; restore them, or name another "
                    "folder with --folder"
                )


def recorded_rows(folder: Path) -> Iterator[tuple[Path, Config, Mapping[str, Any]]]:
    """Yield a run for each combination of sources: its directory, its configuration, and the rows that it recorded."""
    seen: set[str] = set()
    for run, manifest in manifests_of(folder):
        # The rows of self-training are recorded round by round.
        if not manifest.get("data") or "rounds" in manifest:
            continue
        data = manifest["config"].get("data", {})
        sources = json.dumps({key: data.get(key) for key in SOURCES}, sort_keys=True)
        if sources not in seen:
            seen.add(sources)
            yield run, load_config(manifest["config"]).config, manifest["data"]


def manifests_of(folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield run directory and manifest of each trial that has begun; in a cross-validation, those of its first fold."""
    for trial in sorted((folder / TRIALS).glob("*")):
        run = next((place for place in (trial, trial / "fold-1") if (place / "manifest.json").exists()), None)
        if run is not None:
            yield run, read_manifest(run)


def size_of(record: Mapping[str, Any] | None) -> str:
    """Return the number of rows of a split, for messages."""
    if record is None:
        return "none"
    return "a stream" if record["rows"] is None else counted(record["rows"], "row")
