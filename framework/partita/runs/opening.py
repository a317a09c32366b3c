"""Open a run directory: new, continued or finished; lock it, and record how it starts and ends."""

import logging
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from partita.runs.cost import Cost
from partita.runs.directory import FollowedRun, RunDirectory
from partita.runs.exits import exits_as_errors
from partita.runs.files import writing
from partita.runs.locks import lock
from partita.runs.manifest import now, runs_within, versions
from partita.runs.origin import command_line, git_commit
from partita.runs.row_results import EARLIER as EARLIER_EVALUATIONS
from partita.runs.row_results import FOLDER as EVALUATIONS
from partita.runs.settings import FREE_KEYS, asks_for_more, check_same, differences
from partita_schema.common.checksums import DamagedError
from partita_schema.common.files import write_atomically
from partita_schema.common.text import describe_error
from partita_schema.config import Config
from partita_schema.errors import JobError, LostRankError, OtherRankError, PartitaError, ResumeError
from partita_schema.records import FORMAT_VERSION
from partita_schema.yaml.variables import escaped
from partita_trainers.checkpoints.file_sums import check_sums
from partita_trainers.interrupt import delayed_signals
from partita_trainers.process_group import ProcessGroup

logger = logging.getLogger(__name__)

WRITTEN = (
    *("config.yaml", "resolved.yaml", "samples.json", "log.jsonl"),
    *("model", "checkpoints", "tokenizer", "evaluations"),
)
"""Names that a run writes and that a user's own files may have."""
DESCRIPTION = ("manifest.json", "config.yaml", "resolved.yaml")
"""Files that describe a run, which are written when it starts."""
ALWAYS_WRITTEN = ("manifest.json", "config.yaml", "resolved.yaml", "ledger.json", "samples.json", "tokenizer", ".lock")
"""Files that a run writes before its first step."""


def log_run(folder: Path, start: str) -> None:
    """Log which run directory a command uses, and how it starts: the first line of its log."""
    fields = {"event": "run", "directory": str(folder), "start": start}
    logger.info("run directory: %s (%s)", folder, start, extra={"fields": fields})


def start_of(run: RunDirectory) -> str:
    """Return how a run starts: new, resumed from its newest checkpoint, from the beginning again, or not at all."""
    if not run.manifest:
        return "new"
    if stays_finished(run):
        return "finished"
    if run.has_checkpoints or "rounds" in run.manifest or (run.finished and not run.config.trains):
        return "continued"
    if run.finished:
        return "trained again from its first step: it has no checkpoints any more"
    return "started again: it has no checkpoint yet"


def stays_finished(run: RunDirectory) -> bool:
    """Return whether a run is finished, and the file asks for no more training or evaluations than it had."""
    recorded, settings = run.manifest.get("config", {}), run.config.model_dump(mode="json")
    stopped_early = run.manifest.get("stopped_early", False)
    return run.finished and not asks_for_more(recorded, settings, stopped_early=stopped_early)


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
    failure = process_group.shared_text("why a rank failed")
    if process_group.rank > 0:
        nothing: dict[str, Any] = {}
        manifest, resumes = process_group.all_gather_object((nothing, False), "the run")[0]
        try:
            with exits_as_errors():
                yield FollowedRun(folder, config=config, manifest=manifest, resumes=resumes)
        except Exception as error:
            if not isinstance(error, OtherRankError):
                failure.write(f"rank {process_group.rank} failed: {describe_error(error)}")
            raise
        return
    with open_run(folder, config=config, text=text, resolved=resolved, origin=origin, quiet=quiet) as run:
        process_group.all_gather_object((run.manifest, run.has_checkpoints), "the run")
        try:
            with exits_as_errors():
                yield run
        except (LostRankError, KeyboardInterrupt) as ended:
            # The rank that failed is gone, or the launcher has ended this one because of it.
            if reason := failure.read():
                raise OtherRankError(reason) from ended
            raise


@contextmanager
def open_run(
    folder: Path, *, config: Config, text: str | None, resolved: str, origin: Path, quiet: bool = False
) -> Iterator[RunDirectory]:
    """Open a new or resumed run, and record in its status how it ended.

    A finished run is left unchanged unless the file now asks for more training or evaluations. A run without a
    checkpoint may be started again with another file. A new run that ends before its first step leaves no directory,
    and any other run keeps its status if wrong input ends the start.

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
        if run.finished or run.checkpoints.is_dir() or "rounds" in run.manifest:
            check_same(recorded, settings, folder=folder)
        if run.finished:
            check_not_shorter(run, settings)
        if not recorded:
            check_free(folder)
        log_run(folder, start_of(run))
        if stays_finished(run):
            for change in differences(recorded, settings, without=()):
                logger.info("no effect on the finished run: %s", change)
            yield run
            return
        before = RecordedRun.of(run) if recorded else None
        try:
            record_start(run, origin=origin)
            write_atomically(folder / "config.yaml", text or yaml.safe_dump(escaped(settings), sort_keys=False))
            write_atomically(folder / "resolved.yaml", resolved)
            with end_noted(run):
                yield run
        except BaseException as error:
            with delayed_signals():
                if before is not None and (before.is_finished or is_wrong_input(error)):
                    before.restore_unless_changed()
                if not existed and holds_nothing(folder):
                    remove_new(folder, parents=new_parents)
            raise
        finally:
            shutil.rmtree(folder / EARLIER_EVALUATIONS, ignore_errors=True)


@contextmanager
def end_noted(run: RunDirectory) -> Iterator[None]:
    """Record in the status of a run that this context was interrupted or has failed, and finish its trackers.

    When a process fails, the launcher ends the others with a signal. It may arrive before this or meanwhile.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        failed = interrupt.__context__ if isinstance(interrupt.__context__, OtherRankError) else None
        with delayed_signals():
            run.note(status="interrupted" if failed is None else "failed", error=str(failed) if failed else None)
        raise
    except BaseException as error:
        # A full disk has no room for this either, and the first error is raised.
        with delayed_signals(), suppress(OSError):
            of_other = isinstance(error, OtherRankError)  # its text begins with the rank, or says that it is gone
            run.note(status="failed", error=str(error) if of_other else describe_error(error))
        raise
    finally:
        run.trackers.finish()


def is_wrong_input(error: BaseException) -> bool:
    """Return whether an error is about the file or the data of a command, and not about the job."""
    return isinstance(error, PartitaError) and not isinstance(error, JobError)


@dataclass(frozen=True)
class RecordedRun:
    """A run before it is started again.

    If that ends before anything is trained, as after a typing error in the command, the run stays as it was: finished,
    or interrupted.
    """

    folder: Path
    is_finished: bool
    files: Mapping[str, bytes]
    """Contents of the files that describe the run, by name."""
    state: frozenset[tuple[str, int, int]]
    """The log, the model and the checkpoints, by `training_state`."""

    @classmethod
    def of(cls, run: RunDirectory) -> "RecordedRun":
        """Return the state of a run."""
        paths = [path for name in DESCRIPTION if (path := run.folder / name).is_file()]
        files = {path.name: path.read_bytes() for path in paths}
        return cls(run.folder, run.finished, files, training_state(run.folder))

    def restore_unless_changed(self) -> None:
        """Put back the description of the run and its results of rows, unless it has been trained further."""
        if training_state(self.folder) != self.state:
            return
        evaluations, earlier = self.folder / EVALUATIONS, self.folder / EARLIER_EVALUATIONS
        with suppress(OSError):  # the error of the run is raised
            if earlier.is_dir():
                shutil.rmtree(evaluations, ignore_errors=True)
                earlier.rename(evaluations)
            for name, content in self.files.items():
                write_atomically(self.folder / name, content.decode())
            logger.info(
                "the run in %s stays %s, as it was", self.folder, "finished" if self.is_finished else "unfinished"
            )


def training_state(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Return name, size and time of change of the log, the model and the checkpoints in a run directory."""
    paths = [*folder.glob("log.jsonl"), *folder.glob("model"), *folder.glob("checkpoints/*"), *folder.glob("rounds/*")]
    return frozenset((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths)


def check_not_shorter(run: RunDirectory, settings: Mapping[str, Any]) -> None:
    """Raise ResumeError if the file asks for less training than a finished run had.

    The steps of self-training are those of all rounds together, and
    the file limits those of one, so that they are not compared.
    """
    if "rounds" in run.manifest:
        check_rounds(run, settings)
        return
    before, now_asked = run.manifest["config"]["trainer"], settings["trainer"]
    steps, max_steps = run.manifest.get("steps"), now_asked.get("max_steps")
    change = None
    if max_steps is not None:
        if steps is not None and max_steps < steps:
            change = f"has taken {steps:,} steps, and trainer.max_steps is {max_steps:,}"
    elif before.get("max_steps") is None and not run.manifest.get("stopped_early"):
        epochs, asked = before.get("epochs"), now_asked.get("epochs")
        if epochs is not None and asked is not None and asked < epochs:
            change = f"has trained {epochs:g} epochs, and trainer.epochs is {asked:g}"
    if change is not None:
        raise ResumeError(f"the run in {run.folder} {change}; raise it, or give this run another folder with --run")


def check_rounds(run: RunDirectory, settings: Mapping[str, Any]) -> None:
    """Raise ResumeError if the file asks for fewer rounds of self-training, or for more training before them."""
    plan = (settings.get("simulation") or {}).get("self_training") or {}
    rounds, asked = len(run.manifest["rounds"]), plan.get("rounds")
    change = None
    if asked is not None and asked < rounds:
        change = f"has {rounds} rounds of self-training, and simulation.self_training.rounds is {asked}; raise it"
    for key in ("epochs", "max_steps"):
        before, now_asked = (one["trainer"].get(key) for one in (run.manifest["config"], settings))
        if before != now_asked:
            change = f"has trained rounds after trainer.{key}: {before}, which cannot change to {now_asked}; undo that"
    if change is not None:
        raise ResumeError(f"the run in {run.folder} {change}, or give this run another folder with --run")


def check_free(folder: Path) -> None:
    """Raise ResumeError if a folder that is not a run holds other runs, or files that a run would overwrite."""
    taken = [name for name in WRITTEN if (folder / name).exists()]
    if taken:
        raise ResumeError(f"{folder} is not a run and holds {', '.join(taken)}; name another folder with --run")
    within = runs_within(folder)
    if within:
        name = shlex.quote(str(folder / "NAME"))
        raise ResumeError(f"{folder} holds runs, such as {within[0]}; name another folder, such as --run {name}")


def record_start(run: RunDirectory, *, origin: Path) -> None:
    """Write the start of a run to its manifest, and log what has changed in the configuration since the last one.

    Results of rows that are of another model, or of other rows, are set aside: they are put back if nothing is trained.
    """
    evaluations, earlier = run.folder / EVALUATIONS, run.folder / EARLIER_EVALUATIONS
    shutil.rmtree(earlier, ignore_errors=True)  # left by a start that was killed
    settings, recorded = run.config.model_dump(mode="json"), run.manifest.get("config", {})
    for change in differences(recorded, settings, without=()) if recorded else ():
        logger.info("changed since the run began: %s", change)
    if recorded and differences(recorded, settings, without=(*FREE_KEYS, "simulation")):
        run.note(batch_sizes={}, metrics_base={})  # the batches differ, so their sizes must be found again
        with suppress(FileNotFoundError):
            evaluations.rename(earlier)
    if run.finished:
        run.note(earlier_evaluations=len(run.manifest.get("evaluations", ())))
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
    """Reopen a finished run whose model is damaged or missing, to write it again from the newest checkpoint."""
    result = run.folder / "model"
    try:
        if run.manifest.get("model") is not None and not result.is_dir():
            raise DamagedError(f"{result} is missing")
        check_sums(result)
    except DamagedError as error:
        if not run.has_checkpoints and "rounds" not in run.manifest:
            raise ResumeError(f"{error}, and the run has no checkpoint to write it from; restore it") from None
        aside = run.folder / "damaged-model"
        kept = ""
        if result.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
            result.rename(aside)
            kept = f"kept as {aside} and "
        logger.warning("%s; it is %swritten again from the newest checkpoint", error, kept)
        run.note(status="interrupted")


def remove_new(folder: Path, *, parents: Sequence[Path]) -> None:
    """Remove the folder of a new run, and the parents that were created for it, the innermost one first."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another run has begun there
        for parent in parents:
            parent.rmdir()


def holds_nothing(folder: Path) -> bool:
    """Return whether a run ended before it left anything to resume from or to inspect."""
    with suppress(OSError):
        return all(path.name in ALWAYS_WRITTEN or is_empty(path) for path in folder.iterdir())
    return False


def is_empty(path: Path) -> bool:
    """Return whether a folder has no entries, or a file no content."""
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0
