"""A run directory: created, locked, written atomically, and resumed.

config.yaml     the file as written              resolved.yaml   every value with its origin
samples.json    some training rows
manifest.json   status, versions, sizes, metrics  log.jsonl       one line per step
checkpoints/    model/    journal/    quarantine.jsonl    ledger.json
evaluations/    results of the rows of each evaluated split
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from partita.runs.cost import Cost
from partita.runs.files import lock, strict_json, without_infinities, writing
from partita.runs.manifest import FREE_KEYS, check_free, check_same, differences, now, read_manifest, versions
from partita.runs.origin import command_line, git_commit
from partita.runs.progress import show_progress
from partita.runs.row_results import FOLDER as EVALUATIONS
from partita.runs.tracking import Trackers
from partita_schema.common.checksums import DamagedError, parse_json, sealed
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import OtherRankError, ResumeError
from partita_schema.records import FORMAT_VERSION, ManifestRecord
from partita_schema.yaml.variables import escaped
from partita_trainers.file_sums import check_sums
from partita_trainers.process_group import ProcessGroup

logger = logging.getLogger(__name__)

ALWAYS_WRITTEN = ("manifest.json", "config.yaml", "resolved.yaml", "ledger.json", "samples.json", "tokenizer", ".lock")
"""Files that a run writes before its first step."""


class RunDirectory:
    """An open run, locked by this process until it is closed."""

    def __init__(self, folder: Path, *, config: Config, quiet: bool = False) -> None:
        self.folder, self.config, self.quiet = folder, config, quiet
        self.manifest: dict[str, Any] = read_manifest(folder)
        self.cost: Cost | None = None
        """What the run takes; None unless this process runs it."""
        self.trackers = Trackers(config.tracking, folder=folder, settings=config.model_dump(mode="json"))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return self.manifest.get("status") == "done"

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has a checkpoint to resume from."""
        return any(self.checkpoints.glob("step-*"))

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Append a record to log.jsonl, and pass it to the trackers."""
        with (self.folder / "log.jsonl").open("a", encoding="utf8") as file:
            file.write(strict_json(record) + "\n")
        self.trackers.log({f"train/{key}": value for key, value in record.items()}, step=record["step"])

    def truncate_log(self, step: int) -> None:
        """Remove logged steps after `step`, a torn last line, and damaged lines."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return
        lines, damaged = list[bytes](), 0
        for line in path.read_bytes().splitlines(keepends=True):
            logged = step_of(line)
            if logged is not None and logged <= step:
                lines.append(line.removesuffix(b"\n") + b"\n")
            damaged += logged is None and line.endswith(b"\n")
        if damaged:
            logger.warning("%s: %s left out", path, counted(damaged, "damaged line"))
        write_atomically(path, b"".join(lines))
        evaluations = [record for record in self.manifest.get("evaluations", []) if record["step"] <= step]
        resumed = [*self.manifest.get("resumed", []), step] if step else []
        self.note(evaluations=evaluations, resumed=resumed)

    def report(self, metrics: Mapping[str, float], *, step: int, split: str) -> None:
        """Record the metrics of a split, and pass them to the trackers."""
        latest = {**self.manifest.get("metrics", {}), split: dict(metrics)}
        evaluations = [*self.manifest.get("evaluations", []), {"step": step, "split": split, **metrics}]
        self.note(metrics=latest, evaluations=evaluations)
        self.trackers.log({f"{split}/{key}": value for key, value in metrics.items()}, step=step)

    def note(self, **values: Any) -> None:
        """Store values in manifest.json, with what the run has taken so far."""
        self.manifest |= values if self.cost is None else {"cost": self.cost_so_far, **values}
        self.manifest["updated"] = now()
        manifest = sealed(without_infinities(ManifestRecord().dump(self.manifest)))
        write_atomically(self.folder / "manifest.json", strict_json(manifest, indent=2) + "\n")

    @property
    def cost_so_far(self) -> dict[str, float]:
        """What the run has taken in this process and in earlier starts; {} if this process does not run it."""
        return {} if self.cost is None else self.cost.record()

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager[Any]:
        """Return a progress bar, or plain lines without a terminal."""
        return show_progress(total, description, completed=completed, quiet=self.quiet)


def step_of(line: bytes) -> int | None:
    """Return the step of a line of log.jsonl; None if the line is torn or damaged."""
    try:
        return int(parse_json(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


class FollowedRun(RunDirectory):
    """The run on ranks that write nothing: noted values stay in memory."""

    def __init__(self, folder: Path, *, config: Config, manifest: Mapping[str, Any], resumes: bool) -> None:
        """Follow a run that another rank writes.

        Args:
            folder: The run directory.
            config: The configuration.
            manifest: The manifest of the writing rank.
            resumes: Whether the writing rank sees checkpoints.
        """
        self.folder, self.config, self.quiet = folder, config, True
        self.manifest = dict(manifest)
        self.cost = Cost({})
        self.resumes = resumes
        self.trackers = Trackers((), folder=folder, settings={})

    @property
    def has_checkpoints(self) -> bool:
        """Whether the writing rank found a checkpoint; another machine may see new files later."""
        return self.resumes

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Do nothing; rank 0 writes the log."""

    def truncate_log(self, step: int) -> None:
        """Do nothing; rank 0 writes the log."""

    def note(self, **values: Any) -> None:
        """Store values in memory."""
        self.manifest |= values


def log_run(folder: Path, start: str) -> None:
    """Log which run directory a command uses, and how it starts: the first line of its log."""
    fields = {"event": "run", "directory": str(folder), "start": start}
    logger.info("run directory: %s (%s)", folder, start, extra={"fields": fields})


def start_of(run: RunDirectory) -> str:
    """Return how a run starts: new, resumed from its newest checkpoint, from the beginning again, or not at all."""
    if not run.manifest:
        return "new"
    if run.finished and run.manifest.get("config") == run.config.model_dump(mode="json"):
        return "finished"
    if run.has_checkpoints or "rounds" in run.manifest or (run.finished and not run.config.trains):
        return "continued"
    if run.finished:
        return "trained again from its first step: it has no checkpoints any more"
    return "started again: it has no checkpoint yet"


@contextmanager
def open_run_of_group(
    process_group: ProcessGroup,
    folder: Path,
    *,
    config: Config,
    text: str | None,
    resolved: str,
    origin: Path,
    quiet: bool = False,
) -> Iterator[RunDirectory]:
    """Open a run for a process group: rank 0 calls `open_run`, the others follow it.

    Args:
        process_group: The ranks of the run.
        folder: The run directory.
        config: The configuration.
        text: The configuration file as written, if there is one.
        resolved: The resolved configuration as YAML.
        origin: Folder that relative paths of the file are resolved against.
        quiet: Show no progress.
    """
    if process_group.rank > 0:
        nothing: dict[str, Any] = {}
        manifest, resumes = process_group.all_gather_object((nothing, False), "the run")[0]
        yield FollowedRun(folder, config=config, manifest=manifest, resumes=resumes)
        return
    with open_run(folder, config=config, text=text, resolved=resolved, origin=origin, quiet=quiet) as run:
        process_group.all_gather_object((run.manifest, run.has_checkpoints), "the run")
        yield run


@contextmanager
def open_run(
    folder: Path, *, config: Config, text: str | None, resolved: str, origin: Path, quiet: bool = False
) -> Iterator[RunDirectory]:
    """Open a new or resumed run, and record in its status how it ended.

    A finished run is left unchanged unless the file now asks for more steps. A run without a checkpoint may be
    started again with another file. A new run that ends before its first step leaves no directory.

    Args:
        folder: The run directory.
        config: The configuration.
        text: The configuration file as written, if there is one.
        resolved: The resolved configuration as YAML.
        origin: Folder that relative paths of the file are resolved against.
        quiet: Show no progress.

    Raises:
        ResumeError: The folder holds another run, or another process has it open.
        WriteError: The folder cannot be written.
    """
    existed = folder.exists()
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    with writing(folder), lock(folder):
        run = RunDirectory(folder, config=config, quiet=quiet)
        settings = config.model_dump(mode="json")
        recorded = run.manifest.get("config", {})
        if run.finished:
            reopen_where_damaged(run)
        if run.finished or run.checkpoints.is_dir():
            check_same(recorded, settings, folder=folder)
        if not recorded:
            check_free(folder)
        log_run(folder, start_of(run))
        if run.finished and recorded == settings:
            yield run
            return
        record_start(run, origin=origin)
        write_atomically(folder / "config.yaml", text or yaml.safe_dump(escaped(settings), sort_keys=False))
        write_atomically(folder / "resolved.yaml", resolved)
        try:
            yield run
        except KeyboardInterrupt as interrupt:
            # When a process fails, the launcher ends the others with a signal.
            failed = interrupt.__context__ if isinstance(interrupt.__context__, OtherRankError) else None
            run.note(status="interrupted" if failed is None else "failed", error=str(failed) if failed else None)
            raise
        except BaseException as error:
            with suppress(OSError):  # a full disk has no room for this either, and the first error is raised
                run.note(status="failed", error=f"{type(error).__name__}: {error}")
            raise
        finally:
            run.trackers.finish()
            if not existed and run.manifest["status"] in ("failed", "interrupted") and holds_nothing(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # another run has begun there
                    for parent in new_parents:
                        parent.rmdir()


def record_start(run: RunDirectory, *, origin: Path) -> None:
    """Write the start of a run to its manifest, and log what has changed in the configuration since the last one."""
    settings, recorded = run.config.model_dump(mode="json"), run.manifest.get("config", {})
    for change in differences(recorded, settings, without=()) if recorded else ():
        logger.info("changed since the run began: %s", change)
    if recorded and differences(recorded, settings, without=(*FREE_KEYS, "simulation")):
        run.note(batch_sizes={}, metrics_base={})  # the batches differ, so their sizes must be found again
        shutil.rmtree(run.folder / EVALUATIONS, ignore_errors=True)  # they are of another model or of other rows
    run.cost = Cost(run.manifest.get("cost", {}))
    commit = git_commit(Path.cwd())
    run.note(
        format_version=FORMAT_VERSION,
        status="running",
        created=run.manifest.get("created", now()),
        starts=run.manifest.get("starts", 0) + 1,
        versions=versions(),
        seed=run.config.seed,
        config=settings,
        folder=str(origin.resolve()),
        command=command_line(),
        code={} if commit is None else {"commit": commit},
        error=None,
    )


def reopen_where_damaged(run: RunDirectory) -> None:
    """Reopen a finished run whose model is damaged, so that the model is written again from the newest checkpoint."""
    result = run.folder / "model"
    try:
        check_sums(result)
    except DamagedError as error:
        if not run.has_checkpoints and "rounds" not in run.manifest:
            raise ResumeError(f"{error}, and the run has no checkpoint to write it from; restore it") from None
        aside = run.folder / "damaged-model"
        shutil.rmtree(aside, ignore_errors=True)
        result.rename(aside)
        logger.warning("%s; it is kept as %s and written again from the newest checkpoint", error, aside)
        run.note(status="interrupted")


def holds_nothing(folder: Path) -> bool:
    """Return whether a run ended before it left anything to resume from or to inspect."""
    with suppress(OSError):
        return all(path.name in ALWAYS_WRITTEN or is_empty(path) for path in folder.iterdir())
    return False


def is_empty(path: Path) -> bool:
    """Return whether a folder has no entries, or a file no content."""
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
