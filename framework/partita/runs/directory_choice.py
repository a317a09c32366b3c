"""Choice of a run directory among NAME, NAME-2, ...: the one to continue, the finished one to use, or a free name."""

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.runs.manifest import read_manifest, runs_within
from partita.runs.origin import data_options
from partita.runs.settings import LOCATION_KEYS, USE_KEYS, changeable, differences, result_keys
from partita_schema.config import Config
from partita_schema.errors import PartitaError

logger = logging.getLogger(__name__)

MAX_SHOWN = 5
"""How many changed keys a message lists."""


@dataclass(frozen=True)
class ChosenRun:
    """The run directory chosen if the caller names none."""

    folder: Path
    not_continued: str | None = None
    """Which other run is not resumed, and how to resume it; None if there is none."""


def choose_folder(name: str, *, config: Config, origin: Path, base: Path) -> ChosenRun:
    """Return the unfinished run under `base/name`, `name-2`, ... that this file may resume, else the first free name.

    A run with exactly this configuration is preferred; otherwise the newest one that differs only in keys that may
    change on resume. A run whose manifest cannot be read is passed over with a warning.

    Args:
        name: Name of the runs.
        config: The configuration of the file.
        origin: Folder of the file: relative paths in another folder name other data.
        base: Parent of the runs.
    """
    settings = config.model_dump(mode="json")
    continuable: Path | None = None
    passed: str | None = None
    free = base / name
    for folder, manifest in numbered_folders(name, base=base, folds=folds_of(config)):
        if isinstance(manifest, PartitaError):
            logger.warning("the run in %s is not used: %s", folder, manifest)
            continue
        if not manifest and not runs_within(folder):
            free = folder
            break
        if is_of_another_folder(manifest, origin):
            continue
        recorded = manifest.get("config", {})
        changed = differences(recorded, settings, without=changeable(recorded, settings))
        if manifest.get("status") == "done":
            if not changed:
                length = "epochs" if getattr(config.trainer, "max_steps", None) is None else "max_steps"
                passed = (
                    f"the run in {folder} is finished; to train it longer on the same rows, raise trainer.{length} and "
                    f"add --run {shlex.quote(str(folder))}"
                )
        elif changed:
            continue
        elif not differences(recorded, settings, without=(*LOCATION_KEYS, *result_keys(recorded, settings))):
            return ChosenRun(folder)
        else:
            continuable = folder
    return ChosenRun(continuable) if continuable is not None else ChosenRun(free, passed)


def unfinished_sibling(
    name: str,
    *,
    config: Config,
    origin: Path,
    base: Path,
    file: str | None,
    used: Path,
    with_changes: bool = False,
) -> str | None:
    """Return which unfinished run among the names of `choose_folder` is not used, and the command that continues it.

    Args:
        name: Name of the runs.
        config: The configuration of the file.
        origin: Folder of the file.
        base: Parent of the runs.
        file: The configuration file, for the command; None if there is none.
        used: The run directory that is used.
        with_changes: Whether to name a run that this file can only continue without its changes.
    """
    settings = config.model_dump(mode="json")
    note: str | None = None
    for folder, manifest in numbered_folders(name, base=base, folds=folds_of(config)):
        if isinstance(manifest, PartitaError) or not manifest or manifest.get("status") == "done":
            continue
        if folder.resolve() == used.resolve():
            continue
        recorded = manifest.get("config", {})
        changed = differences(recorded, settings, without=changeable(recorded, settings))
        if is_of_another_folder(manifest, origin) or (changed and not with_changes):
            continue
        words = ["partita", "train", str(file), "--run", str(folder), *data_options(manifest)]
        command = shlex.join(words) if file is not None else f'train(run="{folder}")'
        note = f"the unfinished run in {folder} is not continued; to continue it: {command}"
        if changed:
            keys = shortened_list(changed)
            note = (
                f"the unfinished run in {folder} is not continued, because other keys changed: {keys}; to continue it, "
                f"undo that: {command}"
            )
    return note


def shortened_list(changed: Sequence[str]) -> str:
    """Return the first changed keys, with those that are most likely the cause: `type` of a section first.

    Of a section that is new or gone, only its type is listed, not its defaults.
    """
    types = [one for one in changed if ".type: " in one]
    sections = tuple(
        f"{one.partition('.type: ')[0]}." for one in types if ": null -> " in one or one.endswith("-> null")
    )
    kept = types + [one for one in changed if one not in types and not one.startswith(sections)]
    more = f"; and {len(kept) - MAX_SHOWN} more" if len(kept) > MAX_SHOWN else ""
    return "; ".join(kept[:MAX_SHOWN]) + more


def find_finished(name: str, *, config: Config, origin: Path, base: Path) -> tuple[Path | None, list[str]]:
    """Return the newest finished run of this file among the names of `choose_folder`.

    Without one, also return how the newest finished run of another file differs: `key: there -> here`.

    Args:
        name: Name of the runs.
        config: The configuration of the file.
        origin: Folder of the file.
        base: Parent of the runs.

    Raises:
        PartitaError: A newer run has a manifest that cannot be read.
    """
    settings = config.model_dump(mode="json")
    newest, apart = None, list[str]()
    unreadable: PartitaError | None = None
    for folder, manifest in numbered_folders(name, base=base):
        if isinstance(manifest, PartitaError):
            unreadable = manifest
        elif manifest.get("status") == "done":
            there = manifest.get("config", {})
            apart = differences(there, settings, without=(*USE_KEYS, *result_keys(there, settings)))
            if is_of_another_folder(manifest, origin):
                apart.insert(0, f"folder of the configuration: {manifest['folder']} -> {origin.resolve()}")
            newest, unreadable = (folder, None) if not apart else (newest, unreadable)
    if unreadable is not None:
        raise unreadable
    return newest, apart


def is_of_another_folder(manifest: Mapping[str, Any], origin: Path) -> bool:
    """Return whether the configuration file of a run lies in another folder; False if that folder no longer exists."""
    recorded = Path(manifest.get("folder") or origin)
    return recorded.is_dir() and recorded.resolve() != origin.resolve()


def numbered_folders(name: str, *, base: Path, folds: int = 0) -> Iterator[tuple[Path, dict[str, Any] | PartitaError]]:
    """Yield `name`, `name-2`, ... with their manifests, or why they cannot be read, up to the first free name.

    A folder with runs in it, such as the folds of a cross-validation, is not free.

    Args:
        name: Name of the runs.
        base: Parent of the runs.
        folds: Number of folds of a cross-validation; its folders have the manifest of `manifest_of_folds`.
    """
    number, is_free = 1, False
    while not is_free:
        folder = base / (name if number == 1 else f"{name}-{number}")
        manifest = manifest_or_error(folder, folds)
        is_free = not manifest and not runs_within(folder)
        yield folder, manifest
        number += 1


def manifest_or_error(folder: Path, folds: int) -> dict[str, Any] | PartitaError:
    """Return the manifest of a run or of the folds of a cross-validation, or the error why it cannot be read."""
    try:
        return read_manifest(folder) or manifest_of_folds(folder, folds)
    except PartitaError as error:
        return error


def folds_of(config: Config) -> int:
    """Return the number of folds of a cross-validation; 0 if the configuration trains one model."""
    split = config.split
    return split.folds if split.type == "kfold" and split.fold is None else 0


def fold_folder(folder: Path, fold: int) -> Path:
    """Return the run directory of a fold, counted from 1."""
    return folder / f"fold-{fold}"


def manifest_of_folds(folder: Path, folds: int) -> dict[str, Any]:
    """Return what the runs of a cross-validation have recorded, like the manifest of one run; {} without any run.

    Args:
        folder: The folder of the runs.
        folds: Number of folds.
    """
    manifests = [read_manifest(fold_folder(folder, fold)) for fold in range(1, folds + 1)]
    recorded = [manifest for manifest in manifests if "config" in manifest]
    if not recorded:
        return {}
    config = deepcopy(recorded[0]["config"])
    for section in ("data", "preprocessing"):
        if split := config.get(section, {}).get("split"):
            split["fold"] = None
    is_done = all(manifest.get("status") == "done" for manifest in manifests)
    return recorded[0] | {"config": config, "status": "done" if is_done else "interrupted"}
