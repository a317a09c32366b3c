"""Tests of callbacks: when they are called, with which facts, how they stop a run, and how errors are reported."""

import random
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from partita_schema.errors import ConfigError, OtherRankError, TrainingError
from partita_schema.sections.callbacks import CallbackConfig
from partita_trainers import Callback, TrainingState
from partita_trainers.callback_setup import build_callbacks, check_callbacks
from partita_trainers.callbacks import HOOKS
from partita_trainers.checkpoints.checkpoint import list_checkpoints

from .conftest import Killed, comparable, run


class Diary:
    """Writes down each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.states: list[TrainingState] = []

    def note(self, hook: str, state: TrainingState) -> None:
        self.calls.append((hook, state.step))
        self.states.append(state)

    def on_start(self, state: TrainingState) -> None:
        self.note("start", state)

    def on_step(self, state: TrainingState) -> None:
        self.note("step", state)

    def on_evaluate(self, state: TrainingState) -> None:
        self.note("evaluate", state)

    def on_checkpoint(self, state: TrainingState) -> None:
        self.note("checkpoint", state)

    def on_end(self, state: TrainingState) -> None:
        self.note("end", state)


class StopAt:
    """Asks to stop in one method at one step."""

    def __init__(self, step: int, *, hook: str = "on_step") -> None:
        setattr(self, hook, self.look)
        self.step = step

    def look(self, state: TrainingState) -> None:
        if state.step == self.step:
            state.stop("it is time")


def with_callbacks(work: Any, *callbacks: object) -> Any:
    return replace(work, callbacks=callbacks)


def on(hook: str, call: Callable[[TrainingState], None]) -> SimpleNamespace:
    """Return a callback with one method."""
    return SimpleNamespace(**{hook: call})


def test_methods_are_called_in_the_order_of_the_training(make_work: Any) -> None:
    diary = Diary()
    run(with_callbacks(make_work(max_steps=4, steps_per_evaluation=2, steps_per_checkpoint=4), diary))
    assert diary.calls == [
        ("start", 0),
        *[("step", 1), ("step", 2), ("evaluate", 2), ("checkpoint", 2)],  # the first evaluation is the best so far
        *[("step", 3), ("step", 4), ("evaluate", 4), ("checkpoint", 4)],
        ("end", 4),
    ]


def test_a_step_after_which_the_run_is_interrupted_is_saved_once(make_work: Any) -> None:
    diary = Diary()
    interrupt = on("on_step", lambda state: signal.raise_signal(signal.SIGINT) if state.step == 3 else None)
    with pytest.raises(KeyboardInterrupt):
        run(with_callbacks(make_work(max_steps=8, steps_per_checkpoint=4, skip_all_evaluation=True), diary, interrupt))
    assert diary.calls[-2:] == [("step", 4), ("checkpoint", 4)]


def test_a_callback_is_given_the_facts_of_the_run(make_work: Any) -> None:
    diary, work = Diary(), make_work(max_steps=4, steps_per_evaluation=2, steps_per_checkpoint=4)
    result = run(with_callbacks(work, diary))
    states = dict(zip(diary.calls, diary.states, strict=True))
    start, second, evaluated, saved, end = (
        states[call] for call in (("start", 0), ("step", 2), ("evaluate", 4), ("checkpoint", 4), ("end", 4))
    )
    assert (start.run, start.total_steps, start.validation_metric) == (work.run.folder, 4, "loss")
    assert (start.loss, start.learning_rate, start.checkpoint, start.is_best) == (None, None, None, False)
    assert dict(second.record) == work.run.log[1]
    assert (second.loss, second.learning_rate) == (work.run.log[1]["loss"], work.run.log[1]["learning_rate"])
    assert second.epoch == pytest.approx(2 / 6)
    assert dict(evaluated.metrics) == work.run.metrics["validation@4"]
    assert (evaluated.best, evaluated.best_step, evaluated.is_best) == (evaluated.metrics["loss"], 4, True)
    assert saved.checkpoint == work.run.checkpoints / "step-000004"
    assert saved.checkpoint.is_dir()
    assert end.results == result.metrics
    assert second.lm is work.lm


def test_the_facts_cannot_be_changed(make_work: Any) -> None:
    def change(state: TrainingState) -> None:
        with pytest.raises(AttributeError):
            state.step = 7  # type: ignore[misc]
        with pytest.raises(TypeError):
            state.metrics["loss"] = 0.0  # type: ignore[index]

    run(with_callbacks(make_work(max_steps=2, steps_per_evaluation=1), on("on_evaluate", change)))


def test_a_callback_that_draws_random_numbers_changes_no_bit_of_the_training(make_work: Any, tmp_path: Path) -> None:
    def draw(state: TrainingState) -> None:
        torch.rand(3), random.random(), np.random.rand()

    plain = make_work(run=make_work.recorder(tmp_path / "plain"), max_steps=8, steps_per_checkpoint=4)
    called = make_work(run=make_work.recorder(tmp_path / "called"), max_steps=8, steps_per_checkpoint=4)
    run(plain)
    run(with_callbacks(called, *(on(hook, draw) for hook in HOOKS)))
    assert comparable(called.run.log) == comparable(plain.run.log)
    files = {path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*") if path.is_file()}
    assert any(path.name == "rng.json" for path in files)
    for path in files:
        assert (tmp_path / "called" / path).read_bytes() == (tmp_path / "plain" / path).read_bytes(), path


@pytest.mark.parametrize("hook", ["on_step", "on_evaluate", "on_checkpoint"])
def test_a_callback_stops_the_training_after_the_step(make_work: Any, hook: str, tmp_path: Path) -> None:
    work = make_work(max_steps=8, steps_per_evaluation=3, steps_per_checkpoint=3)
    result = run(with_callbacks(work, StopAt(3, hook=hook)))
    assert (result.steps, result.stopped_early) == (3, True)
    assert work.run.noted["stopped_by"] == "StopAt: it is time"
    assert list_checkpoints(work.run.checkpoints)[-1] == 3
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "validation" in result.metrics


def test_a_stop_before_the_first_step_takes_none(make_work: Any) -> None:
    assert run(with_callbacks(make_work(max_steps=8), StopAt(0, hook="on_start"))).steps == 0


def test_a_stop_after_the_last_step_is_no_early_stop(make_work: Any) -> None:
    work = make_work(max_steps=4)
    result = run(with_callbacks(work, StopAt(4)))
    assert (result.steps, result.stopped_early, work.run.noted["stopped_by"]) == (4, False, None)


@pytest.mark.parametrize("hook", ["on_step", "on_evaluate", "on_checkpoint"])
def test_a_run_that_was_stopped_and_killed_before_its_end_is_not_trained_longer(make_work: Any, hook: str) -> None:
    def die(state: TrainingState) -> None:
        raise Killed

    options = {"max_steps": 8, "steps_per_checkpoint": 3, "steps_per_evaluation": 3}
    work = make_work(**options)
    with pytest.raises(Killed):
        run(with_callbacks(work, StopAt(3, hook=hook), on("on_end", die)))
    result = run(make_work(**options))
    assert (result.steps, result.resumed_from, result.stopped_early) == (3, 3, True)
    longer = run(make_work(**options | {"max_steps": 9}))
    assert (longer.steps, longer.stopped_early) == (9, False)


def test_a_stop_before_a_resume_is_not_one_after_it(make_work: Any) -> None:
    def die(state: TrainingState) -> None:
        if state.step == 5:
            raise Killed

    options = {"max_steps": 8, "steps_per_checkpoint": 3, "skip_all_evaluation": True}
    with pytest.raises(Killed):  # the request of step 5 is lost with the step
        run(with_callbacks(make_work(**options), StopAt(5), on("on_step", die)))
    result = run(make_work(**options))
    assert (result.steps, result.resumed_from, result.stopped_early) == (8, 3, False)


def test_the_log_says_which_callback_stopped_the_run(make_work: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="partita_trainers")
    run(with_callbacks(make_work(max_steps=8), StopAt(3)))
    assert "stopping after step 3 of 8: StopAt: it is time" in caplog.messages


def test_a_resumed_run_starts_after_its_checkpoint_and_reports_the_lost_steps_again(make_work: Any) -> None:
    def die(state: TrainingState) -> None:
        if state.step == 6:
            raise Killed

    options = {"max_steps": 8, "steps_per_checkpoint": 4, "skip_all_evaluation": True}
    first, second = Diary(), Diary()
    with pytest.raises(Killed):
        run(with_callbacks(make_work(**options), first, on("on_step", die)))
    work = make_work(**options)
    run(with_callbacks(work, second))
    assert first.calls[-3:] == [("checkpoint", 4), ("step", 5), ("step", 6)]
    assert second.calls[0] == ("start", 4)
    assert second.states[0].checkpoint == work.run.checkpoints / "step-000004"
    assert [step for hook, step in second.calls if hook == "step"] == [5, 6, 7, 8]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_names_the_callback_the_method_the_step_and_the_line(make_work: Any, hook: str) -> None:
    class Broken:
        pass

    def fail(state: TrainingState) -> None:
        _ = {}["key"]

    broken = Broken()
    setattr(broken, hook, fail)
    work = make_work(max_steps=2, steps_per_evaluation=2)
    with pytest.raises(TrainingError) as caught:
        run(with_callbacks(work, broken))
    step = {"on_start": 0, "on_step": 1}.get(hook, 2)
    line = fail.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"the callback Broken failed in {hook} at step {step} (test_callbacks.py, line {line}): KeyError: 'key'; fix "
        "it, and rerun the same command to resume"
    )
    assert isinstance(caught.value.__cause__, KeyError)


class SecondOfTwo:
    """Rank 1 of two, to which rank 0 sends what is in `results`."""

    rank, world_size, local_world_size = 1, 2, 2

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def run_on_rank_zero(self, call: Any, about: str) -> Any:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_another_rank_calls_nothing_and_learns_of_the_stop(make_work: Any) -> None:
    from partita_trainers.callbacks import Callbacks

    diary = Diary()
    group = SecondOfTwo(["on_step"], None, "StopAt: it is time", OtherRankError("rank 0 failed"))
    callbacks = Callbacks(replace(make_work(), callbacks=(diary,), process_group=group))
    callbacks.call("on_start", step=0)  # no callback of rank 0 has it, so nothing is exchanged
    callbacks.call("on_step", step=1)
    assert callbacks.stopped_by is None
    callbacks.call("on_step", step=2)
    assert callbacks.stopped_by == "StopAt: it is time"
    with pytest.raises(OtherRankError):
        callbacks.call("on_step", step=3)
    assert diary.calls == []


class WithoutMethods(Callback):
    """Overrides nothing."""


class Misspelled:
    def on_evaluation(self, state: TrainingState) -> None: ...


class Async:
    async def on_step(self, state: TrainingState) -> None:
        pass


class TooMany:
    def on_step(self, state: TrainingState, loss: float) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Diary, "callbacks: got <class 'tests.trainers.test_callbacks.Diary'>; write a list of callbacks"),
        ([Diary], "callbacks[0]: Diary is a class; write Diary()"),
        (
            [Diary(), WithoutMethods()],
            (
                "callbacks[1]: WithoutMethods has no method that is called during training; define on_start, on_step, "
                "on_evaluate, on_checkpoint or on_end"
            ),
        ),
        (
            [Misspelled()],
            "callbacks[0]: Misspelled has no method that is called during training; did you mean on_evaluate?",
        ),
        (
            [TooMany()],
            (
                "callbacks[0]: TooMany.on_step cannot be called with the state as its only argument: missing a "
                "required argument: 'loss'; write def on_step(self, state)"
            ),
        ),
        (
            [Async()],
            "callbacks[0]: Async.on_step is async and would never run; write def on_step(self, state)",
        ),
    ],
    ids=["not a list", "class", "no method", "misspelled", "too many arguments", "async"],
)
def test_objects_that_are_no_callbacks_are_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_callbacks(callbacks)


def test_a_method_that_is_never_called_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class OfTransformers(Diary):
        def on_epoch_end(self, state: TrainingState) -> None: ...

    check_callbacks([OfTransformers()])
    assert caplog.messages == [
        "callbacks[0]: OfTransformers.on_epoch_end is never called; the methods are " + ", ".join(HOOKS)
    ]


CODE = """
class Goal:
    def __init__(self, loss=0.0, kind="any"):
        self.loss, self.kind = float(loss), kind

    def on_step(self, state):
        if state.loss < self.loss:
            state.stop()

class Nothing:
    pass
"""


def sections(**section: Any) -> list[CallbackConfig]:
    return [CallbackConfig.model_validate({"type": "custom", **section})]


def test_a_callback_of_the_configuration_is_created_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "goals_of_a_test.py").write_text(CODE)
    (goal,) = build_callbacks(
        sections(target="goals_of_a_test:Goal", options={"loss": 0.5, "kind": "low"}), folder=tmp_path
    )
    assert vars(goal) == {"loss": 0.5, "kind": "low"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"target": "goals_of_a_test:Gaol"},
            "callbacks[0].target: module goals_of_a_test has no class Gaol; did you mean Goal?",
        ),
        (
            {"target": "no_such_module:Goal"},
            "callbacks[0].target: there is no module no_such_module; install it or put its folder on PYTHONPATH",
        ),
        (
            {"target": "goals_of_a_test:Goal", "options": {"los": 1}},
            (
                "callbacks[0].options: Goal cannot be created with these keyword arguments: got an unexpected keyword "
                "argument 'los'"
            ),
        ),
        (
            {"target": "goals_of_a_test:Goal", "options": {"loss": "low"}},
            (
                "callbacks[0]: Goal cannot be created with {'loss': 'low'}: ValueError: could not convert string to "
                "float: 'low'"
            ),
        ),
        (
            {"target": "goals_of_a_test:Nothing"},
            (
                "callbacks[0].target: Nothing has no method that is called during training; define on_start, on_step, "
                "on_evaluate, on_checkpoint or on_end"
            ),
        ),
    ],
    ids=["class", "module", "option", "constructor", "no method"],
)
def test_mistakes_in_the_section_are_reported_with_their_key(tmp_path: Path, section: Any, message: str) -> None:
    (tmp_path / "goals_of_a_test.py").write_text(CODE)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        build_callbacks(sections(**section), folder=tmp_path)
