"""A sweep: trials are chosen, run, and compared. What is done is kept, and the same call continues."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partita.backends.arguments import count_of, path_of
from partita.data.run_data import open_run_data
from partita.report.sweep_page import REPORT, write_sweep_page
from partita.runs.files import writing
from partita.runs.manifest import MANIFESTS
from partita.runs.sweep_record import SWEEP, TRIALS
from partita.runs.sweep_result import SweepResult
from partita.runs.waiting import waiting
from partita.sweeps.folder_lock import FolderLock, locked
from partita.sweeps.importance import importances
from partita.sweeps.passed_rows import check_passed, named_dataset, written_rows
from partita.sweeps.same_rows import check_same_rows
from partita.sweeps.same_weights import check_same_weights
from partita.sweeps.sweep_run import SweepPlan, SweepRun
from partita.sweeps.trial import LOG
from partita.sweeps.workers import LocalWorkers, Workers, closing
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import JobError, PartitaError, ResumeError
from partita_schema.layers import ConfigSource
from partita_schema.load import load_config
from partita_schema.sections.backend import RayBackendConfig

logger = logging.getLogger(__name__)

SWEEPS = Path("sweeps")
"""Default parent of the folders of sweeps."""
TRIAL_NAMES = "[0-9][0-9][0-9]-*"
"""Pattern of the names of run directories of trials."""
INSTALL = "pip install 'partita[sweep]'"


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
        self.plan = SweepPlan.of(load_config(config, overrides=overrides))
        self.quiet = quiet

    @property
    def config(self) -> Config:
        """The validated configuration."""
        return self.plan.config

    @property
    def name(self) -> str:
        """Stem of the file name; names the folder of the sweep."""
        file = self.plan.loaded.file
        return Path(file).stem if file else "sweep"

    def run(self, dataset: Any = None, folder: str | Path | None = None, *, workers: int | None = None) -> SweepResult:
        """Run all trials that have not ended, and return the result. Call it again to continue.

        Args:
            dataset: Replaces data.source: a path or glob, a Hub name, a pandas frame, a Dataset or DatasetDict of
                `datasets`, a list of dicts or a dict of lists. Rows are written to the folder while trials run.
            folder: Folder of the sweep. Default: sweeps/NAME.
            workers: Number of processes that run trials, instead of `sweep.workers`, or of `backend.workers` on Ray.

        Raises:
            PartitaError: Optuna is not installed.
            ResumeError: The folder holds a sweep of another file, or of other rows or weights, or is in use; or it is
                a run, or holds other files that a sweep would overwrite.
            DataError: The dataset cannot be read, or not by other processes.
            JobError: All trials failed, or the sweep cannot continue.
        """
        check_passed(dataset)
        if find_spec("optuna") is None:
            raise PartitaError("the values of trials are chosen by Optuna, which is missing here; " + INSTALL)
        place = SWEEPS / self.name if folder is None else path_of("folder", folder)
        count = count_of("workers", workers)
        with writing(place):
            check_free(place)
        with writing(place), locked(place) as lock:
            progress = SweepRun(self.plan, place, dataset=named_dataset(dataset), quiet=self.quiet)
            progress.check_same()
            progress.take_ended()
            with waiting("reading the rows and the base models", line=False):
                check_same_weights(place, origin=self.plan.loaded.folder, finished=progress.finished)
                check_same_rows(place, origin=self.plan.loaded.folder, dataset=dataset, finished=progress.finished)
                if not progress.begun:
                    open_rows(self.plan, dataset)
            progress.log_start()
            if not progress.finished:
                progress.save()
                with (
                    written_rows(dataset, place) as progress.rows,
                    closing(open_workers(self.plan, count=count, lock=lock)) as pool,
                ):
                    progress.work(pool)
            result = progress.save()
        if result.best is None:
            raise JobError(failure_of(result))
        page = write_sweep_page(result, importances(self.plan.search, result.trials))
        if not self.quiet:
            logger.info("report: %s", page)
        return result


def check_free(folder: Path) -> None:
    """Raise ResumeError if a folder that is not of a sweep is a run, or holds files that a sweep would overwrite.

    A sweep without its sweep.json, which may be removed if it is damaged, is recognized by its trials.
    """
    taken = [name for name in (*MANIFESTS, TRIALS, REPORT) if (folder / name).exists()]
    if taken and not (folder / SWEEP).exists() and not any((folder / TRIALS).glob(TRIAL_NAMES)):
        raise ResumeError(f"{folder} is not a sweep and holds {', '.join(taken)}; name another folder with --folder")


def open_rows(plan: SweepPlan, dataset: Any) -> None:
    """Open the rows of a new sweep once. If they cannot be read, all trials would fail.

    Nothing is opened if the sweep varies the data, or if the rows come from elsewhere, such as a simulation.

    Raises:
        DataError: They cannot be read.
    """
    data = plan.config.data
    given = dataset is not None or data.source is not None or data.mix is not None
    vary = any(key.partition(".")[0] == "data" for key in plan.section.parameters)
    if given and not vary and not plan.config.cross_validates:
        open_run_data(plan.config, folder=plan.loaded.folder, dataset=dataset)


def open_workers(plan: SweepPlan, *, count: int | None, lock: FolderLock) -> Workers:
    """Return the workers that run trials.

    Args:
        plan: The sweep.
        count: Number of trials at a time; None for that of the file.
        lock: The lock of the folder, which all processes hold.
    """
    backend = plan.config.backend
    if isinstance(backend, RayBackendConfig):
        from partita.sweeps.ray_workers import RayWorkers

        return RayWorkers(backend, device=plan.config.model_parameters.device, count=count, lock=lock)
    return LocalWorkers(count=count or plan.section.workers, lock=lock.descriptor)


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
