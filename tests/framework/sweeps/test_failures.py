"""Tests of the errors of failed trials: what they say, and which advice they give."""

import errno
import math
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from partita import Sweep
from partita.runs.manifest import read_manifest
from partita.runs.sweep_record import TrialResult
from partita.sweeps import trial
from partita.sweeps.trial import FAILED, NOT_RESUMED, NOT_WRITTEN, TrialOrder, disk_error, failure_text, result_of
from partita_schema.errors import DataError, JobError, ResumeError, TrainingError, WriteError

RUN = Path("sweeps/colours/trials/000-0")
AGAIN = f"and remove {RUN} to run the trial again"
MEMORY = f"memory ran out; use fewer workers {AGAIN}, or write a smaller batch_size and use another --folder"
CALLBACK = """
import sys

class Ends:
    def __init__(self, how):
        self.how = how

    def on_step(self, state):
        if self.how == "memory":
            raise MemoryError
        if self.how == "exit":
            sys.exit(3)
        if self.how == "raise":
            raise ValueError("wrong")
"""
FULL = """
import time
from pathlib import Path

class Full:
    def __init__(self, after=""):
        self.after = after

    def on_start(self, state):
        if not self.after or not Path("full").exists():
            return
        while not any(file.read_bytes() for file in state.run.parent.glob(self.after)):
            time.sleep(0.01)
        file = state.run / ".evaluations.json.writing"
        file.symlink_to(file.name)
"""
"""A callback that lets the first evaluation fail with an error of the disk, while there is a file `full`.

`after` is a pattern of files of trials, one of which is written before; without it, nothing fails.
"""


@pytest.fixture
def full_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the module of the callback `Full` and the file that lets it fail."""
    (tmp_path / "filling.py").write_text(FULL)
    (tmp_path / "full").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def full_after(pattern: str) -> dict[str, Any]:
    """Return the section of the callback `Full`."""
    return {"type": "custom", "target": "filling:Full", "options": {"after": pattern}}


def caused_by(cause: Exception) -> TrainingError:
    """Return the error of a callback, as training raises it."""
    error = TrainingError("the callback Ends failed", "fix it, and rerun the same command to resume")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), MEMORY),
        (caused_by(MemoryError()), f"the callback Ends failed: {MEMORY}"),
        (caused_by(ValueError("wrong")), f"the callback Ends failed; fix it, {AGAIN}"),
        (TrainingError("the objective is not finite"), "the objective is not finite"),
        (SystemExit(3), f"its code called sys.exit(3); remove that call, {AGAIN}"),
        (DataError("there are no rows"), "there are no rows"),
        (KeyError("a"), "KeyError: 'a'"),
    ],
)
def test_the_error_of_a_trial_has_the_advice_for_a_trial(error: BaseException, expected: str) -> None:
    assert failure_text(error, run=RUN) == expected


def test_an_error_of_training_has_its_advice_at_the_end_also_in_another_process() -> None:
    error = pickle.loads(pickle.dumps(caused_by(ValueError())))
    assert str(error) == "the callback Ends failed; fix it, and rerun the same command to resume"
    assert (error.reason, error.advice) == ("the callback Ends failed", "fix it, and rerun the same command to resume")


@pytest.mark.long
def test_trials_whose_callbacks_fail_or_exit_have_failed_and_do_not_end_the_sweep(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text(CALLBACK)
    monkeypatch.chdir(tmp_path)
    config = colours.config(
        trainer={"epochs": 1, "evaluate_generated": False, "evaluate_test": False},
        sweep={"sampler": "grid", "parameters": {"callbacks.0.options.how": ["none", "raise", "memory", "exit"]}},
    )
    config["callbacks"] = [{"type": "custom", "target": "ending:Ends", "options": {"how": "none"}}]
    result = Sweep(config, quiet=True).run(colours.rows(32), tmp_path / "sweep")
    errors = [trial.result.error for trial in result.trials if trial.result is not None]
    failed = re.escape("the callback Ends failed in on_step at step 1 (ending.py, line ")
    again = [f"and remove {re.escape(str(result.run_of(trial)))} to run the trial again" for trial in result.trials]
    assert errors[0] is None
    assert re.fullmatch(rf"{failed}\d+\): ValueError: wrong; fix it, {again[1]}", errors[1] or "")
    memory = f"memory ran out; use fewer workers {again[2]}, or write a smaller batch_size and use another --folder"
    assert re.fullmatch(rf"{failed}\d+\): MemoryError: {memory}", errors[2] or "")
    called = r"the callback Ends called sys\.exit\(3\) in on_step at step 1 \(ending\.py, line 12\)"
    assert re.fullmatch(rf"{called}; fix it, {again[3]}", errors[3] or "")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TypeError("Object of type float32 is not JSON serializable"), FAILED),
        (OSError(28, "No space left on device"), NOT_WRITTEN),
        (WriteError("the disk is full"), NOT_WRITTEN),
        (ResumeError("the file has changed"), NOT_RESUMED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_after_a_trial_is_printed_by_its_process(
    error: Exception, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trial, "redirect_output", lambda _: None)
    monkeypatch.setattr(trial, "run_trial", lambda _: TrialResult("done", 0.5))
    monkeypatch.setattr(trial, "write_result", fail)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    order = TrialOrder(
        number=0,
        config={},
        origin=tmp_path,
        run=tmp_path / "trial",
        dataset=None,
        rows=None,
        metric="loss",
        search=None,  # type: ignore[arg-type]
        earlier=(),
        threads=1,
        arguments=("partita", "sweep"),
    )
    assert trial.execute(order) == status
    assert capsys.readouterr().err.endswith(f"{error}\n")


@pytest.mark.parametrize(
    ("number", "file", "is_of_disk"),
    [
        (errno.ENOSPC, None, True),
        (errno.EDQUOT, str(RUN / "evaluations.json"), True),
        (errno.EACCES, "/elsewhere/rows.csv", False),
        (errno.ENOENT, str(RUN / "evaluations.json"), False),
    ],
)
def test_an_error_of_writing_to_the_run_is_told_from_other_errors_of_a_callback(
    number: int, file: str | None, is_of_disk: bool
) -> None:
    cause = OSError(number, os.strerror(number), file)
    assert disk_error(caused_by(cause), folder=RUN) is (cause if is_of_disk else None)
    assert disk_error(caused_by(ValueError("wrong")), folder=RUN) is None


@pytest.mark.long
def test_a_trial_whose_evaluation_cannot_be_written_has_not_failed_and_continues(
    colours: Any, full_folder: Path
) -> None:
    trainer = {"epochs": 1, "evaluations_per_epoch": 2, "evaluate_generated": False, "evaluate_test": False}
    sweep = {"sampler": "grid", "parameters": {"trainer.learning_rate": [0.01]}}
    config = colours.config(trainer=trainer, sweep=sweep) | {"callbacks": [full_after("*/manifest.json")]}
    with pytest.raises(JobError) as caught:
        Sweep(config, quiet=True).run(colours.rows(32), full_folder / "sweep")
    (run,) = (full_folder / "sweep" / "trials").iterdir()
    assert str(caught.value) == f"the files of {run} cannot be written; see {run / 'trial.log'}, and run it again"
    reason = f"WriteError: files in {run} cannot be written: {os.strerror(errno.ELOOP)}\n"
    assert (run / "trial.log").read_text(encoding="utf8").endswith(reason)
    (full_folder / "full").unlink()
    (trial,) = Sweep(config, quiet=True).run(colours.rows(32), full_folder / "sweep").trials
    assert trial.result is not None
    assert (trial.result.state, len(trial.result.curve)) == ("done", 2)


@pytest.mark.long
def test_a_trial_that_cannot_be_written_lets_the_others_save_their_progress(colours: Any, full_folder: Path) -> None:
    trainer = {"epochs": 10_000, "steps_per_checkpoint": 100_000, "evaluate_generated": False}
    parameters = {"callbacks.0.options.after": ["", "000-*/log.jsonl"]}
    sweep = {"sampler": "grid", "parameters": parameters, "workers": 2}
    config = colours.config(trainer=trainer, sweep=sweep) | {"callbacks": [full_after("")]}
    with pytest.raises(JobError, match=r"the files of .*/trials/001-[0-9a-f]{8} cannot be written; see "):
        Sweep(config, quiet=True).run(colours.rows(32), full_folder / "sweep")
    (other,) = (full_folder / "sweep" / "trials").glob("000-*")
    assert read_manifest(other)["status"] == "interrupted"
    assert list(other.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [(math.inf, "is infinite: no answer to the validation rows is valid"), (math.nan, "is not a number")],
)
def test_a_metric_without_a_value_fails_the_trial_and_keeps_the_others(value: float, reason: str) -> None:
    result = result_of({"score.mae": value, "loss": 0.5}, metric="score.mae")
    assert (result.state, result.error, result.metrics) == ("failed", f"score.mae {reason}", {"loss": 0.5})
