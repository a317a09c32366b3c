"""What can be removed from runs: checkpoints of finished runs, old unfinished runs, cached tokens, torn files.

Nothing is removed that partita did not write, and no model. A run is locked while files of it are removed, and one that
a process has open is left alone.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.runs.listing import RunSummary, size_of
from partita.runs.locks import LOCK, lock, try_lock_twice
from partita.runs.manifest import MANIFESTS, read_manifest
from partita.runs.rounds import ROUNDS
from partita.runs.row_results import EARLIER
from partita_schema.common.checksums import DamagedError
from partita_schema.errors import PartitaError, ResumeError
from partita_trainers.checkpoints.file_sums import check_sums

DAY = 24 * 60 * 60
CHECKPOINTS = ("step-*", ".step-*", "damaged-step-*")
"""Names in the folder of checkpoints, as glob patterns."""
OF_A_RUN = (
    *("config.yaml", "resolved.yaml", "log.jsonl", "ledger.json", "quarantine.jsonl", "report.html", "tokenizer"),
    *("samples.json", ".quarantine.jsonl.earlier", "trial.log", "evaluations*", "journal"),
    *("references.jsonl", "references-bf16.jsonl", "references-fp16.jsonl"),
)
"""Names in the folder of an unfinished run, as glob patterns, besides its checkpoints, its manifest and its lock."""
TORN = (".*.writing", ".*.partial", ".tokens-*", ".ray-*", EARLIER)
"""Names of files in a run that a killed process has not completed or removed, as glob patterns."""
KEY = re.compile(r"[0-9a-f]{32}")
"""Name of cached tokens."""
MODELS = ("model", "damaged-model", ROUNDS)
"""Names of models in a run; an unfinished run with one of them is kept."""


@dataclass(frozen=True)
class Removable:
    """Files that can be removed together."""

    folder: Path
    """The run directory, or the folder of cached tokens."""
    what: str
    bytes: int
    find: Callable[[], list[Path]]
    """Finds the paths again, once the folder is locked; empty if they may no longer be removed."""
    locked: Callable[[], AbstractContextManager[Any]]
    """Locks the folder; raises ResumeError if a process uses it."""
    is_whole_run: bool = False


def removable_of_runs(runs: Iterable[RunSummary], *, older_than_days: float, now: float) -> list[Removable]:
    """Return what can be removed from runs.

    Args:
        runs: The runs.
        older_than_days: Age from which an unfinished run is removed.
        now: The time in seconds since 1970.
    """
    found = list[Removable]()
    for run in runs:
        for folder in (run.folder, *round_folders(run.folder)):
            found += removable_of(folder, run, older_than_days=older_than_days, now=now)
    return found


def removable_of(folder: Path, run: RunSummary, *, older_than_days: float, now: float) -> Iterator[Removable]:
    """Yield what can be removed from a run directory, or from that of one of its rounds.

    Args:
        folder: The directory.
        run: The run.
        older_than_days: Age from which an unfinished run is removed.
        now: The time in seconds since 1970.
    """

    def item(what: str, find: Callable[[], list[Path]], *, whole: bool = False) -> Iterator[Removable]:
        paths = find()
        if paths:
            yield Removable(folder, what, sum(map(size_of, paths)), find, lambda: lock(run.folder), whole)

    if folder.is_symlink() or run.status in ("running", "unreadable", "outputs"):
        return
    age = (now - run.updated) / DAY
    if run.status != "done" and folder == run.folder and age > older_than_days and files_of_unfinished(folder):
        yield from item(f"{run.status} run, {age:,.0f} days old", lambda: files_of_unfinished(folder), whole=True)
        return
    yield from item("incomplete files", lambda: torn_files(folder))
    if run.status == "done":
        yield from item("checkpoints of a finished run", lambda: checkpoints_of_finished(folder))


def round_folders(folder: Path) -> list[Path]:
    """Return the directories of the rounds of self-training of a run."""
    return sorted(path for path in (folder / ROUNDS).glob("*") if (path / "manifest.json").is_file())


def torn_files(folder: Path) -> list[Path]:
    """Return files that a killed process has not completed."""
    return [path for pattern in TORN for path in sorted(folder.glob(pattern)) if not path.is_symlink()]


def checkpoints_of_finished(folder: Path) -> list[Path]:
    """Return the checkpoints of a run; none if it is not finished, or its manifest or model is missing or damaged."""
    try:
        if read_manifest(folder).get("status") != "done" or not any((folder / "model").glob("*")):
            return []
        check_sums(folder / "model")
    except (PartitaError, DamagedError):  # a damaged model can be written again from a checkpoint
        return []
    return checkpoints_in(folder)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a run directory; of links, none."""
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink() or not checkpoints.is_dir():
        return []
    return sorted(path for pattern in CHECKPOINTS for path in checkpoints.glob(pattern) if not path.is_symlink())


def files_of_unfinished(folder: Path) -> list[Path]:
    """Return the files that partita wrote into an unfinished run; none if it is finished or holds a model.

    The manifest is the last one, so that a removal that is interrupted can be repeated.
    """
    if read_manifest(folder).get("status") == "done" or any((folder / name).exists() for name in MODELS):
        return []
    named = [path for pattern in OF_A_RUN for path in sorted(folder.glob(pattern)) if not path.is_symlink()]
    return [*checkpoints_in(folder), *torn_files(folder), *named, folder / "manifest.json"]


def removable_of_cache(folder: Path, *, older_than_days: float, now: float) -> list[Removable]:
    """Return cached tokens that can be removed: old ones, and those that a killed process left incomplete.

    A later run that needs removed tokens computes them again.

    Args:
        folder: The cache of tokens.
        older_than_days: Age from which tokens are removed.
        now: The time in seconds since 1970.
    """
    found = list[Removable]()
    for lock_file in sorted(folder.glob("*.lock")):
        if not KEY.fullmatch(lock_file.stem):
            continue
        tokens, old = folder / lock_file.stem, now - lock_file.stat().st_mtime > older_than_days * DAY

        def find(tokens: Path = tokens, old: bool = old) -> list[Path]:
            torn = sorted(tokens.parent.glob(f".{tokens.name}.*"))
            return [*torn, *([tokens] if old and (tokens / "contents.json").is_file() else [])]

        def locked(lock_file: Path = lock_file) -> AbstractContextManager[None]:
            return lock_of_tokens(lock_file)

        paths = list[Path]()
        try:
            with locked():
                paths = find()
        except ResumeError:
            continue
        except OSError:  # the lock cannot be opened; `remove` gives the reason
            paths = find()
        if paths:
            what = "cached tokens" if tokens in paths else "incomplete cached tokens"
            found.append(Removable(tokens, what, sum(map(size_of, paths)), find, locked))
    return found


@contextmanager
def lock_of_tokens(path: Path) -> Iterator[None]:
    """Lock cached tokens in this context. Raise ResumeError if a process is computing them."""
    with path.open("a") as file:
        if not try_lock_twice(file, path):
            raise ResumeError(f"{path} is in use by another process")
        yield


@dataclass(frozen=True)
class Removal:
    """What was done with files that can be removed."""

    freed: int
    """Bytes."""
    problems: list[str]
    """What could not be removed, with the reasons."""


def remove(item: Removable) -> Removal:
    """Remove the files of an item. Files that cannot be removed stay, and the others are removed all the same.

    Raises:
        ResumeError: A process uses it now.
    """
    freed, problems = 0, list[str]()
    try:
        with item.locked():
            for path in item.find():
                if problems and path.name == MANIFESTS[0]:  # the run stays in the list, so that this can be repeated
                    continue
                size = size_of(path)
                problems += remove_path(path)
                freed += size - size_of(path)
            remove_empty(item.folder / "checkpoints")
            if item.folder.is_dir() and {path.name for path in item.folder.iterdir()} <= {LOCK}:
                problems += remove_path(item.folder)
    except OSError as error:  # the folder can be neither locked nor listed
        problems.append(reason_of(error, item.folder))
    return Removal(freed, problems)


def remove_path(path: Path) -> list[str]:
    """Remove a file, or a folder with as much of it as possible. Return the first reason why something stays."""
    errors = list[str]()

    def note(_: object, failed: str, error: BaseException | tuple[Any, BaseException, Any]) -> None:
        errors.append(reason_of(error[1] if isinstance(error, tuple) else error, Path(failed)))

    try:
        if not path.is_dir():
            path.unlink()
        elif sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=note)
        else:
            shutil.rmtree(path, onerror=note)
    except OSError as error:
        errors.append(reason_of(error, path))
    return errors[:1]


def reason_of(error: BaseException, path: Path) -> str:
    """Return a message with the path and why it stays."""
    return f"{path}: {getattr(error, 'strerror', None) or error}"


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()
