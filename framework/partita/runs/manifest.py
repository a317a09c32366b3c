"""manifest.json, the description of a run, and the choice of a run directory by comparing it with the file."""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marshmallow import ValidationError

from partita_schema.common.checksums import DamagedError, unsealed
from partita_schema.common.text import nearest
from partita_schema.config import Config
from partita_schema.errors import PartitaError, ResumeError
from partita_schema.records import FORMAT_VERSION, ManifestRecord

PACKAGES = ("partita", "torch", "transformers", "peft", "bitsandbytes", "datasets", "accelerate", "tokenizers", "numpy")

MANIFESTS = ("manifest.json", "partita.json")
"""Names of the description: of a run, and of a model saved outside of one."""


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


def versions() -> dict[str, str]:
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


WRITTEN = (
    *("config.yaml", "resolved.yaml", "samples.json", "log.jsonl"),
    *("model", "checkpoints", "tokenizer", "evaluations"),
)
"""Names that a run writes and that a user's own files may have."""

LOCATION_KEYS = ("backend",)
"""Keys that may differ between starts of the same file: where the run takes place. `result_keys` adds others."""

BESIDE_ROUNDS = ("simulation.tasks", "simulation.history", "simulation.repeats", "simulation.limits")
"""Keys of the simulation that do not affect self-training."""

FREE_KEYS = (
    "trainer.epochs",
    "trainer.max_steps",
    "trainer.early_stop",
    "trainer.keep_checkpoints",
    "trainer.checkpoints_per_epoch",
    "trainer.steps_per_checkpoint",
    "trainer.evaluate_test",
    "trainer.evaluate_base",
    "trainer.restore_best",
    "trainer.memory_budget",
    "data.loader",
    "data.encode",
    "data.resume",
    "tracking",
    "callbacks",
    "backend",
    "simulation.self_training.rounds",
)
"""Keys that may change when a run is resumed, together with those of `result_keys`."""

DATA_KEYS = ("data", "preprocessing", "seed")
"""Keys that may also change if data.resume says how to continue."""

USE_KEYS = (
    "generation",
    "tracking",
    "callbacks",
    "trainer.eval_batch_size",
    "trainer.max_batch_size",
    "trainer.memory_budget",
    "trainer.max_generated_rows",
    "trainer.evaluate_base",
    "data.loader",
    "data.encode",
    "data.resume",
    "data.test",
    "data.max_bad_rows",
    "backend",
)
"""Keys that did not affect training and may differ when a finished run is used, with those of `result_keys`."""


def check_free(folder: Path) -> None:
    """Raise ResumeError if a folder that is not a run holds files that a run would overwrite."""
    taken = [name for name in WRITTEN if (folder / name).exists()]
    if taken:
        raise ResumeError(f"{folder} is not a run and holds {', '.join(taken)}; name another folder with --run")


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], *, folder: Path) -> None:
    """Raise ResumeError, naming each value that differs, if a run cannot be resumed with this file."""
    changed = differences(old, new, without=changeable(old, new))
    if changed:
        listing = "\n".join(f"  {line}" for line in changed[:20])
        raise ResumeError(f"{folder} holds a run of another file:\n{listing}\ngive this run another folder with --run")


def changeable(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that may change when a run with the old settings is resumed with the new ones."""
    strict = new.get("data", {}).get("resume", "strict") == "strict"
    return (*FREE_KEYS, *result_keys(old, new), *(() if strict else DATA_KEYS))


def result_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that concern only a run's result: those of the simulation, unless self-training uses it."""
    trains = any((settings.get("simulation") or {}).get("self_training") for settings in (old, new))
    return BESIDE_ROUNDS if trains else ("simulation",)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, without: Sequence[str]) -> list[str]:
    """Return `key: old -> new` for each value that differs, except below the keys in `without`."""
    before, after = leaves(old), leaves(new)
    apart = tuple(f"{key}." for key in without)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not f"{key}.".startswith(apart)
    ]


def leaves(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path; list items by their index."""
    items: Any = ()
    if isinstance(settings, Mapping):
        items = settings.items()
    elif isinstance(settings, list):
        items = enumerate(settings)
    if items and settings:
        return {key: value for name, item in items for key, value in leaves(item, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): settings}


@dataclass(frozen=True)
class ChosenRun:
    """The run directory chosen if the caller names none."""

    folder: Path
    not_continued: str | None = None
    """Which other run is not resumed, and how to resume it; None if there is none."""


def choose_folder(name: str, *, config: Config, base: Path) -> ChosenRun:
    """Return the unfinished run under `base/name`, `name-2`, ... that this file may resume, else the first free name.

    A run with exactly this configuration is preferred; otherwise the newest one that differs only in keys that may
    change on resume.
    """
    settings = config.model_dump(mode="json")
    continuable: Path | None = None
    passed: str | None = None
    free = base / name
    for folder, manifest in numbered_folders(name, base=base):
        if not manifest:
            free = folder
            break
        recorded = manifest.get("config", {})
        changed = differences(recorded, settings, without=changeable(recorded, settings))
        if manifest.get("status") == "done":
            if not changed:
                passed = (
                    f"the run in {folder} is finished; to train it longer, raise trainer.epochs and add --run {folder}"
                )
        elif changed:
            continue
        elif not differences(recorded, settings, without=(*LOCATION_KEYS, *result_keys(recorded, settings))):
            return ChosenRun(folder)
        else:
            continuable = folder
    return ChosenRun(continuable) if continuable is not None else ChosenRun(free, passed)


def unfinished_sibling(
    name: str, *, config: Config, base: Path, file: str | None, used: Path, with_changes: bool = False
) -> str | None:
    """Return which unfinished run among the names of `choose_folder` is not used, and the command that continues it.

    Args:
        name: Name of the runs.
        config: The configuration of the file.
        base: Parent of the runs.
        file: The configuration file, for the command; None if there is none.
        used: The run directory that is used.
        with_changes: Whether to name a run that this file can only continue without its changes.
    """
    settings = config.model_dump(mode="json")
    note: str | None = None
    for folder, manifest in numbered_folders(name, base=base):
        if not manifest or manifest.get("status") == "done" or folder.resolve() == used.resolve():
            continue
        recorded = manifest.get("config", {})
        changed = differences(recorded, settings, without=changeable(recorded, settings))
        if changed and not with_changes:
            continue
        command = f"partita train {file} --run {folder}" if file is not None else f'train(run="{folder}")'
        note = f"the unfinished run in {folder} is not continued; to continue it: {command}"
        if changed:
            keys = "; ".join(changed[:5])
            note = (
                f"the unfinished run in {folder} is not continued, because other keys changed: {keys}; to continue it, "
                f"undo that: {command}"
            )
    return note


def find_finished(name: str, *, config: Config, base: Path) -> tuple[Path | None, list[str]]:
    """Return the newest finished run of this file among the names of `choose_folder`.

    Without one, also return how the newest finished run of another file differs: `key: there -> here`.
    """
    settings = config.model_dump(mode="json")
    newest, apart = None, list[str]()
    for folder, manifest in numbered_folders(name, base=base):
        if manifest.get("status") == "done":
            there = manifest.get("config", {})
            apart = differences(there, settings, without=(*USE_KEYS, *result_keys(there, settings)))
            newest = folder if not apart else newest
    return newest, apart


def sibling_runs(folder: Path, *, most: int = 8) -> str:
    """Return the runs next to a path that is not a run, the newest first, as `; there are a (done), b (failed)`.

    Names similar to that of the path come first. Empty if there are no runs.
    """
    runs = {path: read_status(path) for path in (folder.parent.iterdir() if folder.parent.is_dir() else ())}
    known = sorted((path for path in runs if runs[path]), key=lambda path: (path / MANIFESTS[0]).stat().st_mtime)[::-1]
    if not known:
        return ""
    near = nearest(folder.name, [path.name for path in known])
    hint = f"; did you mean {' or '.join(str(folder.parent / name) for name in near)}?" if near else ""
    more = f" and {len(known) - most:,} more" if len(known) > most else ""
    listing = ", ".join(f"{path} ({runs[path]})" for path in known[:most])
    return f"{hint}; there are {listing}{more}"


def read_status(folder: Path) -> str | None:
    """Return the status of the run in a folder, or None if there is no readable one."""
    try:
        status = read_manifest(folder).get("status") if (folder / MANIFESTS[0]).is_file() else None
    except (PartitaError, OSError):
        return None
    return str(status) if status else None


def numbered_folders(name: str, *, base: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield `name`, `name-2`, ... with their manifests, up to the first free name."""
    number, manifest = 1, {"status": ""}
    while manifest:
        folder = base / (name if number == 1 else f"{name}-{number}")
        manifest = read_manifest(folder)
        yield folder, manifest
        number += 1
