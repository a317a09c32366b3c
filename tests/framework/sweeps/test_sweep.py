"""Tests of a sweep: which trials run, in which order, and what is kept. Workers compute a formula."""

import errno
import json
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from partita.runs.sweep_record import TrialResult, write_result
from partita.runs.sweep_result import SweepResult
from partita.sweeps.sweep import Sweep
from partita.sweeps.sweep_run import SweepPlan, SweepRun
from partita.sweeps.trial import NOT_RESUMED, TrialOrder
from partita.sweeps.workers import TrialEnd, closing, gpus
from partita_schema.errors import ConfigError, DataError, JobError, ResumeError, WriteError
from partita_schema.load import load_config

IF_MEMORY = "if memory ran out, write a smaller batch_size and use another --folder"
Outcome = TrialResult | int | TrialEnd
"""A result, or the exit status of a process without one, or the whole message of a worker."""


class Formula:
    """Workers whose trials have a value at once, and end in a random order."""

    def __init__(self, outcome: Callable[[TrialOrder], Outcome], *, seed: int = 0, kill_after: int = 10**9) -> None:
        self.count = 1
        self.outcome = outcome
        self.rng = random.Random(seed)
        self.kill_after = kill_after
        self.running: list[TrialOrder] = []
        self.started: list[int] = []
        self.most = 0
        self.interrupted = self.closed = False

    def start(self, order: TrialOrder) -> None:
        self.running.append(order)
        self.started.append(order.number)
        self.most = max(self.most, len(self.running))

    def wait(self) -> TrialEnd:
        if not self.kill_after:
            raise KilledError
        self.kill_after -= 1
        order = self.running.pop(self.rng.randrange(len(self.running)))
        outcome = self.outcome(order)
        if isinstance(outcome, TrialEnd):
            return outcome
        if isinstance(outcome, int):
            return TrialEnd(order.number, outcome)
        write_result(order.run, outcome)
        return TrialEnd(order.number, 0)

    def interrupt(self) -> None:
        assert not self.closed
        self.interrupted = True

    def close(self) -> None:
        self.closed = True


class KilledError(Exception):
    """The command was killed."""


def settings(**section: Any) -> dict[str, Any]:
    parameters = {"trainer.learning_rate": {"log_uniform": [1e-5, 1e-1]}, "trainer.epochs": [1, 2, 3]}
    return {
        "base_model": {"type": "scratch", "size": "nano"},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "label", "type": "category"}],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "finetune"},
        "sweep": {"parameters": parameters, "trials": 12, **section},
    }


def good(order: TrialOrder) -> Outcome:
    trainer = order.config["trainer"]
    return TrialResult("done", abs(trainer["learning_rate"] - 0.01) + trainer["epochs"] / 10)


def run(
    folder: Path, pool: Formula, *, workers: int = 1, backend: dict[str, Any] | None = None, **section: Any
) -> SweepResult:
    pool.count = workers
    loaded = load_config(settings(**section) | {"backend": backend or {"type": "local"}})
    progress = SweepRun(SweepPlan.of(loaded), folder, quiet=True)
    progress.check_same()
    progress.take_ended()
    progress.work(pool)
    return progress.save()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_any_number_of_workers_and_any_order_of_their_ends_give_the_same_trials(tmp_path: Path, sampler: str) -> None:
    alone = run(tmp_path / "alone", Formula(good), sampler=sampler)
    for workers in (2, 4, 7):
        pool = Formula(good, seed=workers)
        other = run(tmp_path / str(workers), pool, workers=workers, sampler=sampler)
        assert other.trials == alone.trials
        assert other.best == alone.best
        assert pool.most == (min(workers, 4) if sampler == "tpe" else workers)


def test_a_sweep_that_was_killed_continues_with_the_same_trials(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Formula(good), workers=3)
    started: list[int] = []
    for kill in (0, 1, 0, 2, 3, 1):
        pool = Formula(good, seed=kill, kill_after=kill)
        with pytest.raises(KilledError):
            run(tmp_path / "killed", pool, workers=3)
        started += pool.started
    pool = Formula(good)
    assert run(tmp_path / "killed", pool, workers=2).trials == whole.trials
    ended = 1 + 2 + 3 + 1
    assert len(pool.started) == 12 - ended


def test_a_finished_sweep_starts_nothing_and_more_trials_continue_it(tmp_path: Path) -> None:
    first = run(tmp_path, Formula(good))
    pool = Formula(good)
    assert run(tmp_path, pool) == first
    assert not pool.started
    assert run(tmp_path, pool, trials=15).trials[:12] == first.trials
    assert pool.started == [12, 13, 14]
    with pytest.raises(ResumeError) as error:
        run(tmp_path, Formula(good), trials=3)
    assert str(error.value) == (
        f"{tmp_path} holds 15 trials, and sweep.trials asks for 3; write at least as many, or name another folder with "
        "--folder"
    )


def test_a_failed_trial_is_recorded_with_its_error_and_ends_nothing(tmp_path: Path) -> None:
    def outcome(order: TrialOrder) -> Outcome:
        return TrialResult("failed", error="no memory") if order.number == 3 else good(order)

    result = run(tmp_path, Formula(outcome))
    assert [trial.result.state for trial in result.trials if trial.result is not None].count("failed") == 1
    assert len(result.ranked) == 11
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written["trials"][3]["error"] == "no memory"
    assert written["best"]["number"] == result.ranked[0].number


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (-9, f"was ended by SIGKILL in each of 2 starts; {IF_MEMORY}"),
        (-11, "was ended by SIGSEGV in each of 2 starts; see the end of {log}"),
        (1, "ended with status 1 in each of 2 starts; see the end of {log}"),
    ],
)
def test_a_trial_whose_process_is_killed_is_started_again_once(tmp_path: Path, status: int, expected: str) -> None:
    died: list[int] = []

    def outcome(order: TrialOrder) -> Outcome:
        if order.number == 5 or (order.number == 2 and 2 not in died):
            died.append(order.number)
            return status
        return good(order)

    result = run(tmp_path, Formula(outcome))
    assert died == [2, 5, 5]
    failed = [trial for trial in result.trials if trial.result is not None and trial.result.state == "failed"]
    assert [trial.number for trial in failed] == [5]
    assert failed[0].result is not None
    log = result.run_of(failed[0]) / "trial.log"
    assert failed[0].result.error == f"its process {expected.format(log=log)}"


def test_a_trial_whose_worker_is_lost_continues_as_often_as_the_file_allows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []

    def outcome(order: TrialOrder) -> Outcome:
        if order.number == 5 or (order.number == 2 and lost.count(2) < 2):
            lost.append(order.number)
            return TrialEnd(order.number, None, worker="worker 1 (process 7 on node-2)")
        return good(order)

    result = run(tmp_path, Formula(outcome), backend={"type": "ray", "max_failures": 2})
    assert lost == [2, 2, 5, 5, 5]
    error = f"its worker was lost 3 times (backend.max_failures: 2); {IF_MEMORY}"
    errors = [trial.result.error for trial in result.trials if trial.result is not None]
    assert [(number, text) for number, text in enumerate(errors) if text] == [(5, error)]
    message = "worker 1 (process 7 on node-2) is gone; trial 2 continues on another one (2 of 2 times)"
    assert message in caplog.messages


def test_the_result_that_a_worker_sends_counts_before_its_file_is_seen(tmp_path: Path) -> None:
    result = run(tmp_path, Formula(lambda order: TrialEnd(order.number, 0, result=TrialResult("done", 1.0))), trials=2)
    assert [trial.result for trial in result.trials] == [TrialResult("done", 1.0)] * 2


def test_a_trial_that_cannot_be_resumed_ends_the_sweep_and_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        run(tmp_path, Formula(lambda order: NOT_RESUMED if order.number == 1 else good(order)))
    folder = tmp_path / json.loads((tmp_path / "sweep.json").read_text())["trials"][1]["run"]
    assert str(caught.value) == (
        f"trial 1 cannot be resumed; see the end of {folder / 'trial.log'}, and undo the change, or remove {folder} to "
        "run the trial from its first step"
    )


@pytest.mark.parametrize(
    ("error", "is_interrupted"),
    [
        (JobError("trial 1 cannot be resumed"), True),
        (WriteError("the files of trials/001 cannot be written"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (KeyboardInterrupt(), True),
        (None, False),
    ],
)
def test_trials_save_their_progress_when_the_sweep_cannot_continue(
    error: BaseException | None, is_interrupted: bool
) -> None:
    pool = Formula(good)
    with suppress(type(error or KilledError())), closing(pool):
        if error is not None:
            raise error
    assert (pool.interrupted, pool.closed) == (is_interrupted, True)


def test_values_that_break_a_rule_together_are_a_failed_trial(tmp_path: Path) -> None:
    parameters = {"trainer.batch_size": [4, 6], "trainer.effective_batch_size": [12, 16]}
    result = run(tmp_path, Formula(lambda _: TrialResult("done", 1.0)), parameters=parameters, sampler="grid")
    states = [trial.result.state for trial in result.trials if trial.result is not None]
    assert states == ["done", "done", "done", "failed"]
    error = result.trials[3].result.error if result.trials[3].result is not None else None
    assert error == "trainer.effective_batch_size: effective_batch_size 16 is not a multiple of batch_size 6; write 18"


def test_a_trial_with_the_values_of_an_earlier_one_has_its_result_and_does_not_run(tmp_path: Path) -> None:
    pool = Formula(lambda order: TrialResult("done", float(order.config["trainer"]["epochs"])))
    result = run(tmp_path, pool, parameters={"trainer.epochs": [1, 2]}, trials=8, workers=3)
    assert len(pool.started) == 2
    assert all(trial.result is not None for trial in result.trials)
    assert {trial.repeats for trial in result.trials if trial.repeats is not None} <= set(pool.started)
    assert {result.run_of(trial) for trial in result.trials} == {
        result.run_of(result.trials[number]) for number in pool.started
    }


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_two_texts_of_the_same_number_are_one_value(tmp_path: Path, sampler: str) -> None:
    pool = Formula(lambda _: TrialResult("done", 1.0))
    parameters = {"trainer.learning_rate": ["1e-3", 0.001]}
    result = run(tmp_path, pool, parameters=parameters, trials=2, sampler=sampler, max_concurrent_trials=1)
    assert pool.started == [0]
    assert list(result.to_pandas()["trainer.learning_rate"]) == [0.001, 0.001]


def test_the_configuration_of_a_trial_has_its_values_and_no_sweep(tmp_path: Path) -> None:
    orders: list[TrialOrder] = []

    def outcome(order: TrialOrder) -> Outcome:
        orders.append(order)
        return good(order)

    result = run(tmp_path, Formula(outcome))
    for trial, order in zip(result.trials, orders, strict=True):
        assert order.config["trainer"]["learning_rate"] == trial.values["trainer.learning_rate"]
        assert "sweep" not in order.config
        assert list(order.arguments) == sys.argv
        assert order.run == tmp_path / "trials" / trial.name == result.run_of(trial)
        assert order.run.name.startswith(f"{trial.number:03d}-")


def test_a_folder_with_a_sweep_of_another_file_is_refused_with_what_differs(tmp_path: Path) -> None:
    run(tmp_path, Formula(good), trials=2)
    with pytest.raises(ResumeError) as caught:
        run(tmp_path, Formula(good), trials=2, sampler="random")
    assert str(caught.value) == (
        f"{tmp_path} holds a sweep of another file:\n  sweep.sampler: tpe -> random\nname another folder with --folder"
    )


@pytest.mark.parametrize(
    ("files", "held"),
    [
        (["manifest.json", "report.html"], "manifest.json, report.html"),
        (["partita.json"], "partita.json"),
        (["report.html"], "report.html"),
        (["trials/notes.txt"], "trials"),
    ],
)
def test_a_folder_with_files_that_are_not_of_a_sweep_is_refused_and_nothing_is_written(
    tmp_path: Path, files: list[str], held: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of the user")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResumeError) as caught:
        Sweep(settings()).run([{"text": "a", "label": "b"}], folder=tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a sweep and holds {held}; name another folder with --folder"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_sweep_whose_damaged_description_was_removed_is_finished_from_its_trials(tmp_path: Path) -> None:
    first = run(tmp_path, Formula(good), trials=2)
    Sweep(settings(trials=2), quiet=True).run(folder=tmp_path)
    (tmp_path / "sweep.json").unlink()
    assert Sweep(settings(trials=2), quiet=True).run(folder=tmp_path) == first


def test_a_corrected_file_runs_the_trials_again_once_they_are_removed(tmp_path: Path) -> None:
    run(tmp_path, Formula(lambda _: TrialResult("failed", error="no memory")), trials=2)
    with pytest.raises(ResumeError, match="holds a sweep of another file"):
        run(tmp_path, Formula(good), trials=2, sampler="random")
    shutil.rmtree(tmp_path / "trials")
    assert len(run(tmp_path, Formula(good), trials=2, sampler="random").ranked) == 2
    assert json.loads((tmp_path / "sweep.json").read_text())["settings"]["sweep"]["sampler"] == "random"


def test_a_sweep_that_ended_before_its_first_trial_began_may_continue_with_another_file(tmp_path: Path) -> None:
    SweepRun(SweepPlan.of(load_config(settings())), tmp_path, quiet=True).save()
    (tmp_path / "trials").mkdir()
    assert len(run(tmp_path, Formula(good), trials=2, sampler="random").ranked) == 2


def test_the_same_settings_in_another_folder_are_another_file_unless_the_folder_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, sweep = (tmp_path / name for name in ("first", "second", "sweep"))
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    run(sweep, Formula(good), trials=2)
    monkeypatch.chdir(second)
    with pytest.raises(ResumeError) as caught:
        run(sweep, Formula(good), trials=2)
    assert str(caught.value) == (
        f"{sweep} holds a sweep of another file:\n  folder: {first} -> {second}\nname another folder with --folder"
    )
    first.rmdir()
    assert len(run(sweep, Formula(good), trials=2).trials) == 2


def test_the_best_trial_has_the_lowest_loss_or_the_highest_score(tmp_path: Path) -> None:
    low = run(tmp_path / "low", Formula(good))
    high = run(tmp_path / "high", Formula(good), metric="label.accuracy")
    sized = {trial.number: low.value_of(trial) for trial in low.trials}
    assert low.direction == "minimize"
    assert low.best is not None
    assert low.value_of(low.best) == min(sized.values())
    assert high.direction == "maximize"
    assert high.best is not None
    assert high.value_of(high.best) == max(high.value_of(trial) for trial in high.trials)
    frame = high.to_pandas()
    assert list(frame.columns) == [
        "trial",
        "trainer.learning_rate",
        "trainer.epochs",
        "state",
        "label.accuracy",
        "run",
    ]


def test_a_file_without_a_sweep_is_refused() -> None:
    config = settings()
    del config["sweep"]
    with pytest.raises(ConfigError) as caught:
        Sweep(config)
    assert str(caught.value) == (
        "sweep: is missing; write the parameters to vary, as sweep: {parameters: {trainer.learning_rate: [...]}}"
    )


def test_a_finished_sweep_is_returned_without_a_process_and_its_page_is_written(tmp_path: Path) -> None:
    first = run(tmp_path, Formula(good))
    result = Sweep(settings(), quiet=True).run(folder=tmp_path)
    assert result == first
    assert "The best of 12 results is trial" in (tmp_path / "report.html").read_text()


def test_a_sweep_whose_trials_have_all_failed_raises_the_first_reason(tmp_path: Path) -> None:
    run(tmp_path, Formula(lambda _: TrialResult("failed", error="no memory")), trials=2)
    with pytest.raises(JobError) as caught:
        Sweep(settings(trials=2), quiet=True).run(folder=tmp_path)
    assert str(caught.value) == (
        "none of 2 trials has a result; trial 0: no memory; correct the cause, and remove "
        f"{tmp_path / 'trials'} to run the trials again"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"workers": 0}, "workers is 0; write a whole number of at least 1"),
        (
            {"dataset": (row for row in [{"text": "a"}])},
            (
                "dataset is a generator, which the processes of trials cannot read; pass a pandas frame, a Dataset or "
                "DatasetDict of datasets, a list of dicts or a dict of lists, or write the rows to a file and pass its "
                "path"
            ),
        ),
        ({"dataset": ["a"]}, "row 1 is a str, not a dict of column to value"),
        (
            {"dataset": DatasetDict({"first": Dataset.from_list([{"text": "a"}])})},
            (
                "split 'first' of the DatasetDict is none of train, validation and test; pass one dataset, such as "
                "dataset['first'], or rename it"
            ),
        ),
        ({"folder": 3}, "folder is 3; write a path"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        Sweep(settings()).run(**arguments)
    assert str(caught.value) == expected


def test_rows_that_cannot_be_read_are_an_error_before_any_trial_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source: rows\.jsonl does not exist in"):
        Sweep(settings()).run(folder=tmp_path / "sweep")
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist in"):
        Sweep(settings()).run("missing.jsonl", folder=tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "trials").exists()


def test_the_first_line_of_a_sweep_says_whether_trials_have_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    progress = SweepRun(SweepPlan.of(load_config(settings(trials=2))), tmp_path)
    progress.log_start()
    (tmp_path / "trials" / "000-a").mkdir(parents=True)  # it was killed in its first trial
    progress.log_start()

    assert caplog.messages == [
        f"sweep folder: {tmp_path} (2 trials, new)",
        f"sweep folder: {tmp_path} (2 trials, continued, none has ended yet)",
    ]


def test_a_sweep_whose_metric_means_something_else_in_other_trials_starts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"base_model.tokenizer": ["byte", "word"]}
    for quiet in (True, False):
        plan = SweepPlan.of(load_config(settings(parameters=parameters, metric="loss")))
        SweepRun(plan, tmp_path, quiet=quiet).log_start()
    assert caplog.messages == [
        "base_model.tokenizer changes what loss measures, so trials with other values of it cannot be compared by loss"
    ]


def test_the_model_of_a_trial_with_folds_is_that_of_its_first_fold(tmp_path: Path) -> None:
    result = run(tmp_path, Formula(good), trials=2)
    first, second = result.trials
    (result.run_of(second) / "fold-1").mkdir()
    assert result.model_of(first) == result.run_of(first)
    assert result.model_of(second) == result.run_of(second) / "fold-1"


def test_gpus_are_those_of_the_environment_or_counted_from_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(tmp_path) == ["0", "1"]
    assert gpus(tmp_path / "missing") == []
    for written, expected in (("2, GPU-8f6b", ["2", "GPU-8f6b"]), ("", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", written)
        assert gpus(tmp_path) == expected
