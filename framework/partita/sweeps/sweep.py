"""A sweep: trials are chosen, run, and compared. What is done is kept, and the same call continues."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from typing import Any

from partita.backends.arguments import count_of, path_of
from partita.distributed.init import available_cores
from partita.report.sweep_page import write_sweep_page
from partita.runs.files import writing
from partita.runs.settings import differences
from partita.runs.sweep_record import TRIALS, Trial, TrialResult, read_result, write_result
from partita.runs.sweep_result import SweepResult, read_sweep, trial_line, write_sweep
from partita.sweeps.importance import importances
from partita.sweeps.search import Search
from partita.sweeps.trial import INTERRUPTED, LOG, NOT_RESUMED, NOT_WRITTEN, TrialOrder
from partita.sweeps.workers import LocalWorkers, Workers
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, JobError, PartitaError, Problem, ResumeError
from partita_schema.layers import ConfigSource
from partita_schema.load import load_config
from partita_schema.rules.sweep import sweep_direction, sweep_metric
from partita_schema.sections.sweep import num_trials
from partita_schema.sweep_values import trial_config

logger = logging.getLogger(__name__)

SWEEPS = Path("sweeps")
"""Default parent of the folders of sweeps."""
FREE_KEYS = ("sweep.trials", "sweep.workers", "backend", "tracking")
"""Keys that may change when a sweep continues."""
LOCK_SECONDS = 10.0
"""Seconds to wait for the processes of a killed sweep to end."""
INSTALL = "pip install 'partita[sweep]'"
STARTS = 2
"""How often a trial is started whose process is killed."""


class Sweep:
    """Several runs of one file with other values of some keys."""

    def __init__(self, config: ConfigSource, *, overrides: Sequence[str] = (), quiet: bool = False) -> None:
        """Check the configuration, and every value of the sweep.

        Args:
            config: A path, YAML text, a dictionary or a Config with the section `sweep`; or a list of these.
            overrides: Values for keys of the file, such as `sweep.trials=8`.
            quiet: Log nothing.

        Raises:
            ConfigError: The configuration is invalid, or has no section `sweep`.
        """
        self.loaded = load_config(config, overrides=overrides)
        self.quiet = quiet
        section = self.config.sweep
        if section is None:
            message = "is missing; write the parameters to vary, as sweep: {parameters: {trainer.learning_rate: [...]}}"
            raise ConfigError([Problem("sweep", message, file=self.loaded.file)])
        self.section = section
        self.metric, self.direction = sweep_metric(self.config), sweep_direction(self.config)
        seed = self.config.seed if section.seed is None else section.seed
        self.search = Search(section, self.direction, seed)

    @property
    def config(self) -> Config:
        """The validated configuration."""
        return self.loaded.config

    @property
    def name(self) -> str:
        """Stem of the file name; names the folder of the sweep."""
        return Path(self.loaded.file).stem if self.loaded.file else "sweep"

    def run(
        self, dataset: str | Path | None = None, folder: str | Path | None = None, *, workers: int | None = None
    ) -> SweepResult:
        """Run all trials that have not ended, and return the result. Call it again to continue.

        Args:
            dataset: Replaces data.source: a path, a glob or a Hub name.
            folder: Folder of the sweep. Default: sweeps/NAME.
            workers: Number of processes that run trials, instead of `sweep.workers`.

        Raises:
            PartitaError: Optuna is not installed.
            ResumeError: The folder holds a sweep of another file, or is in use.
            JobError: All trials failed, or the sweep cannot continue.
        """
        if dataset is not None and not isinstance(dataset, str | Path):
            raise DataError(f"dataset is a {type(dataset).__name__}; write the path of a file, which all trials read")
        if find_spec("optuna") is None:
            raise PartitaError("the values of trials are chosen by Optuna, which is missing here; " + INSTALL)
        place = SWEEPS / self.name if folder is None else path_of("folder", folder)
        count = count_of("workers", workers) or self.section.workers
        with writing(place), locked(place) as lock:
            progress = SweepRun(self, place, dataset=None if dataset is None else str(dataset), workers=count)
            progress.check_same()
            progress.take_ended()
            if not progress.finished:
                logger.info("sweep folder: %s (%s)", place, progress.start_text())
                progress.save()
                with LocalWorkers(count=count, lock=lock) as pool:
                    progress.work(pool)
            result = progress.save()
        if result.best is None:
            raise JobError(failure_of(result))
        logger.info("report: %s", write_sweep_page(result, importances(self.search, result.trials)))
        return result


class SweepRun:
    """The trials of a sweep while it runs."""

    def __init__(self, sweep: Sweep, folder: Path, *, dataset: str | None, workers: int) -> None:
        """Start without trials.

        Args:
            sweep: The sweep.
            folder: Its folder.
            dataset: Replaces data.source.
            workers: Number of processes that run trials.
        """
        self.sweep = sweep
        self.folder = folder
        self.dataset = dataset
        self.workers = workers
        self.total = num_trials(sweep.section)
        self.trials: list[Trial] = []
        self.starts: dict[int, int] = {}
        """How often each trial was started that is running."""
        self.threads = threads_of_trials(min(sweep.section.max_concurrent_trials, self.total))

    @property
    def finished(self) -> bool:
        """Whether all trials have ended."""
        return len(self.trials) == self.total and all(trial.result is not None for trial in self.trials)

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when a sweep continues, as JSON."""
        folder = str(self.sweep.loaded.folder.resolve())
        return {**self.sweep.config.model_dump(mode="json"), "dataset": self.dataset, "folder": folder}

    def check_same(self) -> None:
        """Raise ResumeError if the folder holds a sweep of another file.

        Relative paths of the same settings in another folder are other files, unless the folder was moved.
        """
        recorded = read_sweep(self.folder)
        if recorded is None:
            return
        old, new = recorded["settings"], self.settings
        was_moved = not Path(old.get("folder", "")).is_dir()
        changed = differences(old, new, without=(*FREE_KEYS, "folder") if was_moved else FREE_KEYS)
        if changed:
            listing = "\n".join(f"  {line}" for line in changed[:20])
            message = f"{self.folder} holds a sweep of another file:\n{listing}\nname another folder with --folder"
            raise ResumeError(message)

    def start_text(self) -> str:
        """Return whether the sweep is new or continues."""
        ended = sum(trial.result is not None for trial in self.trials)
        return f"{counted(self.total, 'trial')}, " + (f"{ended} already ended" if ended else "new")

    # Trials

    def take_ended(self) -> None:
        """Choose trials and read their results, up to the first one that has to run."""
        while (trial := self.next_trial()) is not None and (trial.result is not None or trial.repeats is not None):
            self.trials.append(trial)
        self.share_results()

    def next_trial(self) -> Trial | None:
        """Choose the next trial; None if there is none, or results that it needs are missing."""
        number = len(self.trials)
        self.share_results()
        awaited = self.trials[: self.sweep.search.awaited(number)]
        if number >= self.total or any(trial.result is None for trial in awaited):
            return None
        values = self.sweep.search.values(self.trials)
        repeats = next((one.number for one in self.trials if dict(one.values) == values and one.repeats is None), None)
        trial = Trial(number, values, repeats=repeats)
        return trial if repeats is not None else replace(trial, result=read_result(self.folder_of(trial)))

    def share_results(self) -> None:
        """Give trials with the values of an earlier one its result."""
        for index, trial in enumerate(self.trials):
            if trial.repeats is not None and trial.result is None:
                self.trials[index] = replace(trial, result=self.trials[trial.repeats].result)

    def folder_of(self, trial: Trial) -> Path:
        """Return the run directory of a trial."""
        return self.folder / TRIALS / trial.name

    # Running

    def work(self, pool: Workers) -> None:
        """Run trials until all have ended."""
        self.fill(pool)
        while self.starts:
            number, status = pool.wait()
            self.end(pool, self.trials[number], status)
            self.fill(pool)
            self.save()

    def fill(self, pool: Workers) -> None:
        """Start trials on free workers."""
        while len(self.starts) < self.workers and (trial := self.next_trial()) is not None:
            self.trials.append(trial)
            if trial.result is None and trial.repeats is None:
                self.start(pool, trial)

    def start(self, pool: Workers, trial: Trial) -> None:
        """Start a trial. One whose values do not fit together has failed."""
        self.starts[trial.number] = self.starts.get(trial.number, 0) + 1
        try:
            config = trial_config(self.sweep.config, trial.values)
        except ConfigError as error:
            write_result(self.folder_of(trial), TrialResult("failed", error=str(error)))
            self.take_result(trial)
            return
        order = TrialOrder(
            number=trial.number,
            config=config.model_dump(mode="json", exclude_unset=True),
            origin=self.sweep.loaded.folder.resolve(),
            run=self.folder_of(trial),
            dataset=self.dataset,
            metric=self.sweep.metric,
            search=self.sweep.search,
            earlier=tuple(self.trials[: trial.number]),
            threads=self.threads,
        )
        pool.start(order)

    def end(self, pool: Workers, trial: Trial, status: int) -> None:
        """Take the result of a trial whose process has ended; one that was killed is started again once.

        Args:
            pool: The workers.
            trial: The trial.
            status: Exit status of its process, negative for a signal.

        Raises:
            JobError: The files of the trial cannot be written, or it cannot be resumed.
            KeyboardInterrupt: The trial was interrupted.
        """
        folder = self.folder_of(trial)
        if status == NOT_WRITTEN:
            raise JobError(f"the files of {folder} cannot be written; see {folder / LOG}, and run it again")
        if status == NOT_RESUMED:
            message = f"trial {trial.number} cannot be resumed; see the end of {folder / LOG}, and undo the change"
            raise JobError(f"{message}, or remove {folder} to run the trial from its first step")
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if read_result(folder) is None and status != 0:
            how = f"by {Signals(-status).name}" if status < 0 else f"with status {status}"
            if self.starts[trial.number] < STARTS:
                logger.warning("the process of trial %d was ended %s; it is started again", trial.number, how)
                self.start(pool, trial)
                return
            error = f"its process was ended {how} {STARTS} times; if memory ran out, write a smaller batch_size"
            write_result(folder, TrialResult("failed", error=error))
        self.take_result(trial)

    def take_result(self, trial: Trial) -> None:
        """Read the result of a trial that has ended, and log it."""
        del self.starts[trial.number]
        ended = replace(trial, result=read_result(self.folder_of(trial)))
        self.trials[trial.number] = ended
        self.share_results()
        if not self.sweep.quiet:
            count = sum(trial.result is not None for trial in self.trials)
            logger.info("[%d/%d] %s", count, self.total, trial_line(ended, metric=self.sweep.metric))

    def save(self) -> SweepResult:
        """Write sweep.json, and return the result so far."""
        result = SweepResult(
            folder=self.folder,
            metric=self.sweep.metric,
            direction=self.sweep.direction,
            trials=tuple(self.trials),
            total=self.total,
        )
        write_sweep(result, settings=self.settings)
        return result


def failure_of(result: SweepResult) -> str:
    """Return why a sweep has no best trial, and what to do."""
    errors = ((trial.result.error, trial) for trial in result.trials if trial.result is not None)
    reason, first = next((error, trial) for error, trial in errors if error is not None)
    trials = result.folder / TRIALS
    log = trials / first.name / LOG
    where = f"; see {log}" if log.exists() else ""
    count = counted(len(result.trials), "trial")
    return (
        f"none of {count} has a result; trial {first.number}: {reason}{where}; correct the cause, and remove "
        f"{trials} to run the trials again"
    )


def threads_of_trials(concurrent: int) -> int:
    """Return the number of threads of a trial: the user's OMP_NUM_THREADS, else its share of the cores.

    It does not depend on the number of workers, because sums over other numbers of threads differ in the last digit.
    """
    written = os.environ.get("OMP_NUM_THREADS", "")
    return int(written) if written.isdigit() and int(written) > 0 else max(1, available_cores() // concurrent)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock the folder of a sweep, and yield the file descriptor of the lock, which other processes may hold too.

    Raises ResumeError if another command works in the folder. Trials of a killed one end within moments.
    """
    with (folder / ".lock").open("w") as file:
        last = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > last:
                    message = f"{folder} is in use by another process; wait for it, or name another folder"
                    raise ResumeError(f"{message} with --folder") from None
                time.sleep(0.1)
        yield file.fileno()
