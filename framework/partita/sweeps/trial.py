"""One trial, in a separate process: train the configuration in its run directory, and write the result there."""

import json
import math
import os
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.runs.files import write_failure
from partita.runs.locks import is_locked
from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult, write_result
from partita.sweeps.folder_lock import LOCK_SECONDS
from partita.sweeps.search import Search
from partita_schema.common.files import write_atomically
from partita_schema.common.text import describe_error
from partita_schema.errors import PartitaError, ResumeError, TrainingError, WriteError, exit_call
from partita_schema.sections.trainer import FinetuneTrainer

if TYPE_CHECKING:
    from partita_trainers.callbacks import TrainingState

FAILED, INTERRUPTED, NOT_WRITTEN, NOT_RESUMED = 1, 130, 74, 75
"""Exit statuses of a trial without a result: its process has failed or was interrupted, its files cannot be written,
and it cannot be resumed."""
LOG, EVALUATIONS = "trial.log", "evaluations.json"


@dataclass(frozen=True)
class TrialOrder:
    """Everything that a process needs to run a trial."""

    number: int
    """Number of the trial."""
    config: dict[str, Any]
    """Configuration of the trial, as JSON."""
    origin: Path
    """Folder that relative paths of the configuration are resolved against."""
    run: Path
    """The run directory."""
    dataset: Any
    """What replaces data.source, as JSON; None for nothing."""
    rows: Path | None
    """File with the rows that replace data.source, if the caller passed some."""
    metric: str
    """Name of the metric on the validation rows."""
    search: Search
    """Decides whether a trial is stopped early."""
    earlier: tuple[Trial, ...]
    """All trials before this one."""
    threads: int
    """Number of threads on the processor."""
    arguments: tuple[str, ...]
    """`sys.argv` of the command of the sweep, which the run records as the command that started it."""
    device: str | None = None
    """CUDA_VISIBLE_DEVICES of the process; None leaves it unchanged."""


def execute(order: TrialOrder) -> int:
    """Run a trial in this process, with its output in a file, and return the exit status."""
    sys.argv = list(order.arguments)
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    if order.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.device
    started, cpu = time.perf_counter(), time.process_time()
    try:
        order.run.mkdir(parents=True, exist_ok=True)
        redirect_output(order.run / LOG)
        wait_for_earlier(order.run)
        result = result_or_failure(order)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        write_result(order.run, replace(result, seconds=round(seconds, 3), cpu_seconds=round(cpu_seconds, 3)))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the process would end without printing it
        with suppress(OSError):
            traceback.print_exc()
        if isinstance(error, ResumeError):
            return NOT_RESUMED
        return NOT_WRITTEN if isinstance(error, WriteError | OSError) else FAILED
    return 0


def wait_for_earlier(run: Path) -> None:
    """Wait until a process of the trial whose worker was lost has ended; if it does not, opening the run fails."""
    last = time.monotonic() + LOCK_SECONDS
    while any(is_locked(folder) for folder in (run, *run.glob("fold-*"))) and time.monotonic() < last:
        time.sleep(0.1)


def result_or_failure(order: TrialOrder) -> TrialResult:
    """Run a trial. An error of the trial is its result; one of the disk, or of changed files on resume, is raised."""
    try:
        return run_trial(order)
    except (ResumeError, WriteError):
        raise
    except (Exception, SystemExit) as error:  # whatever ends a trial is its result
        disk = disk_error(error, folder=order.run)
        if disk is not None:
            raise WriteError(f"files in {order.run} cannot be written: {disk.strerror}") from error
        traceback.print_exc()
        return TrialResult("failed", error=failure_text(error, run=order.run))


def disk_error(error: BaseException, *, folder: Path) -> OSError | None:
    """Return the error of writing to a folder, such as a full disk, that is an error or caused it; None without one.

    If a callback fails, such as the one that records evaluations, its error is the `__cause__` of the error of the
    training.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and write_failure(cause, folder=folder) is not None:
            return cause
        cause = cause.__cause__
    return None


def redirect_output(path: Path) -> None:
    """Append standard output and standard error of this process to a file."""
    with path.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def failure_text(error: BaseException, *, run: Path) -> str:
    """Return why a trial failed, in one or a few lines. Advice is that of a trial, whose failure is its result."""
    again = f"and remove {run} to run the trial again"
    memory = f"memory ran out; use fewer workers {again}, or write a smaller batch_size and use another --folder"
    if isinstance(error, MemoryError):
        return memory
    if isinstance(error, SystemExit):
        return f"its code called {exit_call(error)}; remove that call, {again}"
    if isinstance(error, TrainingError) and isinstance(error.__cause__, MemoryError):
        return f"{error.reason}: {memory}"
    if isinstance(error, TrainingError) and error.advice:
        return f"{error.reason}; fix it, {again}"
    return str(error) if isinstance(error, PartitaError) else describe_error(error)


def run_trial(order: TrialOrder) -> TrialResult:
    """Train in the run directory, or continue, and return the result."""
    import torch

    from partita.backends.context import RunContext
    from partita.backends.folds import train_folds
    from partita.backends.open import open_backend
    from partita.report.run_page import try_to_write_report
    from partita.runs.log import show_log
    from partita.sweeps.passed_rows import read_rows
    from partita_schema.load import load_config

    torch.set_num_threads(order.threads)
    show_log(quiet=False, rank=0)
    loaded = replace(load_config(order.config), folder=order.origin)
    context = RunContext(loaded, quiet=True)
    context.write_heads()
    dataset = order.dataset if order.rows is None else read_rows(order.rows)
    watch = Watch(order)
    if context.config.cross_validates:
        result = train_folds(context, dataset, order.run, callbacks=(), report=try_to_write_report)
    else:
        callbacks = [watch] if isinstance(loaded.config.trainer, FinetuneTrainer) else []
        result = open_backend(context).train(dataset, order.run, callbacks=callbacks)
        try_to_write_report(order.run)
    return watch.result(result_of(dict(result.metrics.get("validation", {})), metric=order.metric))


class Watch:
    """A callback that records the metric of each evaluation, and stops a trial that is not worth its time.

    It follows the training in the run directory of the trial, not the rounds of self-training after it. What it records
    is in a file, so that a trial that is killed continues, or has a result, as if it had not been.
    """

    def __init__(self, order: TrialOrder) -> None:
        """Read what an earlier process has recorded."""
        self.order = order
        self.path = order.run / EVALUATIONS
        recorded = json.loads(self.path.read_bytes()) if self.path.exists() else []
        self.curve = [TrialEvaluation(**one) for one in recorded]

    def on_start(self, state: "TrainingState") -> None:
        """Forget evaluations after the checkpoint from which the run resumes."""
        if not self.is_watched(state):
            return
        self.curve = [one for one in self.curve if one.step <= state.step]

    def on_evaluate(self, state: "TrainingState") -> None:
        """Record an evaluation, and ask the training to stop if the pruner says so."""
        value = state.metrics.get(self.order.metric, math.nan)
        if not self.is_watched(state) or not math.isfinite(value) or not state.total_steps:
            return
        self.curve.append(TrialEvaluation(state.step / state.total_steps, state.step, value))
        write_atomically(self.path, json.dumps([asdict(one) for one in self.curve]))
        if self.stops():
            state.stop("worse than earlier trials of the sweep")

    def is_watched(self, state: "TrainingState") -> bool:
        """Return whether the training is that of the trial, not one of its rounds, which have folders inside."""
        return state.run.resolve() == self.order.run.resolve()

    def stops(self) -> bool:
        """Return whether the trial is stopped at its last evaluation."""
        return self.order.search.should_stop(self.order.earlier, self.curve)

    def result(self, at_end: TrialResult) -> TrialResult:
        """Return the result of the trial, with its curve; `at_end` is that of the trained model."""
        if self.stops():
            at_end = TrialResult("pruned", metrics=at_end.metrics)
        return replace(at_end, curve=tuple(self.curve))


def result_of(metrics: dict[str, float], *, metric: str) -> TrialResult:
    """Return the result of a trial that has ended, with its validation metrics."""
    if metric not in metrics:
        known = ", ".join(sorted(metrics)) or "none: there are no validation rows"
        return TrialResult("failed", error=f"the run has no metric {metric} on validation rows; there are {known}")
    finite = {name: one for name, one in metrics.items() if isinstance(one, int | float) and math.isfinite(one)}
    value = metrics[metric]
    if not math.isfinite(value):
        reason = "is not a number" if math.isnan(value) else "is infinite: no answer to the validation rows is valid"
        return TrialResult("failed", error=f"{metric} {reason}", metrics=finite)
    return TrialResult("done", value=value, metrics=finite)
