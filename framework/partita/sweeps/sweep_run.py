"""The trials of a sweep while it runs: which one is next, and what the end of each means."""

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from partita.distributed.init import available_cores
from partita.runs.settings import differences
from partita.runs.sweep_record import TRIALS, Trial, TrialResult, read_result, write_result
from partita.runs.sweep_result import SweepResult, read_sweep, trial_line, write_sweep
from partita.sweeps.search import Search
from partita.sweeps.trial import INTERRUPTED, LOG, NOT_RESUMED, NOT_WRITTEN, TrialOrder
from partita.sweeps.workers import TrialEnd, Workers
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, JobError, Problem, ResumeError
from partita_schema.load import LoadedConfig
from partita_schema.rules.comparable_trials import sweep_metric, why_incomparable
from partita_schema.rules.sweep import sweep_direction
from partita_schema.sections.backend import RayBackendConfig
from partita_schema.sections.sweep import SweepConfig, num_trials
from partita_schema.sweep_values import trial_config

logger = logging.getLogger(__name__)

FREE_KEYS = ("sweep.trials", "sweep.workers", "backend", "tracking")
"""Keys that may change when a sweep continues."""
STARTS = 2
"""How often a trial is started whose process is killed."""
IF_MEMORY = "if memory ran out, write a smaller batch_size and use another --folder"


@dataclass(frozen=True)
class SweepPlan:
    """The configuration of a sweep, and what follows from it."""

    loaded: LoadedConfig
    section: SweepConfig
    metric: str
    """Full name of the metric that compares trials."""
    search: Search
    """Chooses the values of trials."""

    @classmethod
    def of(cls, loaded: LoadedConfig) -> "SweepPlan":
        """Return the plan of a configuration. Raise ConfigError if it has no section `sweep`."""
        config, section = loaded.config, loaded.config.sweep
        if section is None:
            message = "is missing; write the parameters to vary, as sweep: {parameters: {trainer.learning_rate: [...]}}"
            raise ConfigError([Problem("sweep", message, file=loaded.file)])
        seed = config.seed if section.seed is None else section.seed
        return cls(loaded, section, sweep_metric(config), Search(section, sweep_direction(config), seed))

    @property
    def config(self) -> Config:
        """The validated configuration."""
        return self.loaded.config

    @property
    def total(self) -> int:
        """Number of trials."""
        return num_trials(self.section)

    @property
    def max_losses(self) -> int:
        """How many times a trial continues after its worker was lost."""
        backend = self.config.backend
        return backend.max_failures if isinstance(backend, RayBackendConfig) else 0


@dataclass
class Attempts:
    """How often a running trial was ended from outside."""

    kills: int = 0
    """Ends of its process by a signal, or with an unknown status."""
    losses: int = 0
    """Ends of its worker."""


class SweepRun:
    """The trials of a sweep while it runs."""

    def __init__(self, plan: SweepPlan, folder: Path, *, dataset: Any = None, quiet: bool = False) -> None:
        """Start without trials.

        Args:
            plan: The sweep.
            folder: Its folder.
            dataset: What replaces data.source, as JSON.
            quiet: Do not log the end of each trial.
        """
        self.plan = plan
        self.folder = folder
        self.dataset = dataset
        self.rows: Path | None = None
        """File with the rows that replace data.source, if the caller passed some."""
        self.quiet = quiet
        self.trials: list[Trial] = []
        self.running: dict[int, Attempts] = {}
        """Trials that run, by number."""
        self.threads = threads_of_trials(min(plan.section.max_concurrent_trials, plan.total))

    @property
    def finished(self) -> bool:
        """Whether all trials have ended."""
        return len(self.trials) == self.plan.total and all(trial.result is not None for trial in self.trials)

    @property
    def begun(self) -> bool:
        """Whether a trial has been started, in this or an earlier command."""
        return any((self.folder / TRIALS).glob("*"))

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same when a sweep continues, as JSON."""
        folder = str(self.plan.loaded.folder.resolve())
        return {**self.plan.config.model_dump(mode="json"), "dataset": self.dataset, "folder": folder}

    def check_same(self) -> None:
        """Raise ResumeError if the folder holds trials of another file.

        Relative paths of the same settings in another folder are other files, unless the folder was moved.
        """
        recorded = read_sweep(self.folder)
        if recorded is None or not self.begun:
            return
        old, new = recorded["settings"], self.settings
        was_moved = not Path(old.get("folder", "")).is_dir()
        changed = differences(old, new, without=(*FREE_KEYS, "folder") if was_moved else FREE_KEYS)
        if changed:
            listing = "\n".join(f"  {line}" for line in changed[:20])
            message = f"{self.folder} holds a sweep of another file:\n{listing}\nname another folder with --folder"
            raise ResumeError(message)
        begun = len(recorded["trials"])
        if begun > self.plan.total:
            raise ResumeError(
                f"{self.folder} holds {counted(begun, 'trial')}, and sweep.trials asks for {self.plan.total}; write at "
                "least as many, or name another folder with --folder"
            )

    @property
    def ended(self) -> int:
        """Number of trials that have ended."""
        return sum(trial.result is not None for trial in self.trials)

    def log_start(self) -> None:
        """Log the folder, and whether the sweep is new, continued or finished: the first line of its log."""
        if self.quiet:
            return
        start = "finished" if self.finished else "continued" if self.begun else "new"
        ended = f"{self.ended} already ended" if self.ended else "none has ended yet"
        counts = f", {ended}" if start == "continued" else ""
        fields = {
            "event": "sweep",
            "directory": str(self.folder),
            "start": start,
            "trials": self.plan.total,
            "ended": self.ended,
        }
        text = f"{counted(self.plan.total, 'trial')}, {start}{counts}"
        logger.info("sweep folder: %s (%s)", self.folder, text, extra={"fields": fields})
        reason = why_incomparable(self.plan.config)
        if reason is not None:
            logger.warning("%s", reason)

    # Trials

    def take_ended(self) -> None:
        """Choose trials and read their results, up to the first one that has to run."""
        while (trial := self.next_trial()) is not None and (trial.result is not None or trial.repeats is not None):
            self.trials.append(trial)
        self.share_results()

    def next_trial(self) -> Trial | None:
        """Choose the next trial; None if there is none, or results that it needs are missing."""
        number, search = len(self.trials), self.plan.search
        self.share_results()
        awaited = self.trials[: search.awaited(number)]
        if number >= self.plan.total or any(trial.result is None for trial in awaited):
            return None
        values = search.values(self.trials)
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
        while self.running:
            self.handle_end(pool, pool.wait())
            self.fill(pool)
            self.save()

    def fill(self, pool: Workers) -> None:
        """Start trials on free workers."""
        while len(self.running) < pool.count and (trial := self.next_trial()) is not None:
            self.trials.append(trial)
            if trial.result is None and trial.repeats is None:
                self.running[trial.number] = Attempts()
                self.start(pool, trial)

    def start(self, pool: Workers, trial: Trial) -> None:
        """Start a trial. One whose values do not fit together has failed."""
        try:
            config = trial_config(self.plan.config, trial.values)
        except ConfigError as error:
            self.end(trial, TrialResult("failed", error=str(error)), write=True)
            return
        order = TrialOrder(
            number=trial.number,
            config=config.model_dump(mode="json", exclude_unset=True),
            origin=self.plan.loaded.folder.resolve(),
            run=self.folder_of(trial),
            dataset=self.dataset,
            rows=None if self.rows is None else self.rows.resolve(),
            metric=self.plan.metric,
            search=self.plan.search,
            earlier=tuple(self.trials[: trial.number]),
            threads=self.threads,
            arguments=tuple(sys.argv),
        )
        pool.start(order)

    def handle_end(self, pool: Workers, end: TrialEnd) -> None:
        """Take the result of a trial whose process has ended; one that was killed is started again.

        Args:
            pool: The workers.
            end: How the process ended.

        Raises:
            JobError: The files of the trial cannot be written, or it cannot be resumed.
            KeyboardInterrupt: The trial was interrupted.
        """
        trial = self.trials[end.number]
        folder = self.folder_of(trial)
        if end.status == NOT_WRITTEN:
            raise JobError(f"the files of {folder} cannot be written; see {folder / LOG}, and run it again")
        if end.status == NOT_RESUMED:
            message = f"trial {trial.number} cannot be resumed; see the end of {folder / LOG}, and undo the change"
            raise JobError(f"{message}, or remove {folder} to run the trial from its first step")
        if end.status == INTERRUPTED:
            raise KeyboardInterrupt
        result = end.result or read_result(folder)
        if result is not None:
            self.end(trial, result)
            return
        error = self.error_of_killed(trial, end)
        if error is None:
            self.start(pool, trial)
        else:
            self.end(trial, TrialResult("failed", error=error), write=True)

    def error_of_killed(self, trial: Trial, end: TrialEnd) -> str | None:
        """Return the error of a trial that was killed too often; None if it is started again.

        Args:
            trial: The trial.
            end: How its process ended, without a result.
        """
        attempts = self.running[trial.number]
        if end.status is None:
            attempts.losses += 1
            most = self.plan.max_losses
            if attempts.losses > most:
                return f"its worker was lost {attempts.losses} times (backend.max_failures: {most}); {IF_MEMORY}"
            count = f"{attempts.losses} of {most} times"
            logger.warning("%s is gone; trial %d continues on another one (%s)", end.worker, trial.number, count)
            return None
        attempts.kills += 1
        how = f"was ended by {Signals(-end.status).name}" if end.status < 0 else f"ended with status {end.status}"
        if attempts.kills >= STARTS:
            advice = IF_MEMORY if end.status == -SIGKILL else f"see the end of {self.folder_of(trial) / LOG}"
            return f"its process {how} in each of {STARTS} starts; {advice}"
        logger.warning("the process of trial %d %s; it is started again", trial.number, how)
        return None

    def end(self, trial: Trial, result: TrialResult, *, write: bool = False) -> None:
        """Keep the result of a trial, and log it; with `write`, write it as well."""
        if write:
            write_result(self.folder_of(trial), result)
        del self.running[trial.number]
        ended = replace(trial, result=result)
        self.trials[trial.number] = ended
        self.share_results()
        if not self.quiet:
            self.log_end(ended, result)

    def log_end(self, trial: Trial, result: TrialResult) -> None:
        """Log how a trial ended."""
        fields = {
            "event": "trial",
            "trial": trial.number,
            "state": result.state,
            "values": dict(trial.values),
            "metric": self.plan.metric,
            "value": result.value,
            "error": result.error,
            "directory": str(self.folder_of(trial)),
            "trials": self.plan.total,
            "ended": self.ended,
        }
        line = trial_line(trial, metric=self.plan.metric)
        logger.info("[%d/%d] %s", self.ended, self.plan.total, line, extra={"fields": fields})

    def save(self) -> SweepResult:
        """Write sweep.json, and return the result so far."""
        result = SweepResult(
            folder=self.folder,
            metric=self.plan.metric,
            direction=self.plan.search.direction,
            trials=tuple(self.trials),
            total=self.plan.total,
        )
        write_sweep(result, settings=self.settings)
        return result


def threads_of_trials(concurrent: int) -> int:
    """Return the number of threads of a trial: the user's OMP_NUM_THREADS, else its share of the cores.

    It does not depend on the number of workers, because sums over other numbers of threads differ in the last digit.
    """
    written = os.environ.get("OMP_NUM_THREADS", "")
    return int(written) if written.isdigit() and int(written) > 0 else max(1, available_cores() // concurrent)
