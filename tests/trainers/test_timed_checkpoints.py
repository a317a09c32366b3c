"""Tests of checkpoints that are saved because the last one has become too old."""

from pathlib import Path
from typing import Any

import pytest

from partita_trainers import schedule
from partita_trainers.checkpoints.checkpoint import list_checkpoints
from partita_trainers.steps.step_stats import StepRequests

from .conftest import Killed, assert_resumes, kill_after, run

AFTER_EVERY_STEP = 1e-9
"""Minutes."""
AT_THE_END = {"epochs": 2, "checkpoints_per_epoch": 0, "skip_all_evaluation": True}
"""Settings of a run of 12 steps."""


class Clock:
    """Replaces the clock of the timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.minutes = 1000.0
        monkeypatch.setattr(schedule.time, "monotonic", lambda: 60 * self.minutes)


def steps_take(work: Any, clock: Clock, *, minutes: float) -> list[list[int]]:
    """Let each step of a run take some minutes; return a list that gets the checkpoints that it finds."""
    log_step, found = work.run.log_step, []

    def log(record: dict[str, Any]) -> None:
        log_step(record)
        found.append(list_checkpoints(work.run.checkpoints))
        clock.minutes += minutes

    work.run.log_step = log
    return found


def test_a_run_killed_in_its_first_epoch_resumes_from_a_timed_checkpoint(make_work: Any, tmp_path: Path) -> None:
    straight = make_work(run=make_work.recorder(tmp_path / "straight"), **AT_THE_END)
    run(straight)
    options = AT_THE_END | {"minutes_per_checkpoint": AFTER_EVERY_STEP}
    assert_resumes(make_work, tmp_path / "killed", straight, killed=5, at=4, **options)


def test_a_checkpoint_is_saved_when_the_last_one_is_half_an_hour_old(
    make_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(**AT_THE_END)
    found = steps_take(work, Clock(monkeypatch), minutes=10.5)
    run(work)
    # The first checkpoint follows the fourth step, which begins after 31.5 minutes.
    assert found == [*[[]] * 4, *[[4]] * 4, *[[8]] * 4]
    assert list_checkpoints(work.run.checkpoints) == [12]


def test_any_checkpoint_restarts_the_time(make_work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(**AT_THE_END | {"steps_per_checkpoint": 5})
    found = steps_take(work, Clock(monkeypatch), minutes=10.5)
    run(work)
    assert found == [*[[]] * 4, [4], *[[5]] * 4, [5, 9], *[[5, 10]] * 2]


def test_timed_checkpoints_are_replaced_and_do_not_count(make_work: Any, tmp_path: Path) -> None:
    options = AT_THE_END | {"steps_per_checkpoint": 3, "minutes_per_checkpoint": AFTER_EVERY_STEP}
    folder = tmp_path / "run"
    left = []
    for kill in (2, 5, 9, 12):
        work = make_work(run=make_work.recorder(folder), **options)
        kill_after(work, kill)
        with pytest.raises(Killed):
            run(work)
        left.append(list_checkpoints(folder / "checkpoints"))
    assert left == [[1], [3, 4], [3, 6, 8], [6, 9, 11]]


def test_null_switches_timed_checkpoints_off(make_work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(**AT_THE_END | {"minutes_per_checkpoint": None})
    found = steps_take(work, Clock(monkeypatch), minutes=10_000)
    run(work)
    assert found == [[]] * 12


def test_a_request_of_any_rank_counts() -> None:
    ranks = [StepRequests(), StepRequests(checkpoint=True), StepRequests()]
    assert StepRequests.merge(ranks) == StepRequests(stop=False, checkpoint=True)
    assert StepRequests.merge([StepRequests(stop=True), StepRequests()]) == StepRequests(stop=True)
