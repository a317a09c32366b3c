"""Tests of the checks of what environments and checkers return."""

import json
import re
from typing import Any

import numpy as np
import pytest

from partita.data.episode import Episode
from partita.simulation.contract import (
    OWN_METRICS,
    ContractError,
    Verdict,
    check_step_result,
    check_verdict,
    describe_program_error,
    metrics_of,
    reward_of,
)
from partita.simulation.report import column, outcomes_of
from partita.simulation.worlds import BackgroundCloser, EnvironmentWorld


def test_an_error_has_the_innermost_line_of_the_users_code() -> None:
    def broken() -> None:
        json.loads("{")  # raises within the standard library

    with pytest.raises(json.JSONDecodeError) as raised:
        broken()
    line = broken.__code__.co_firstlineno + 1
    text = describe_program_error(raised.value)
    assert text == f"JSONDecodeError: {raised.value} (test_contract.py, line {line})"
    assert describe_program_error(ValueError("made here")) == "ValueError: made here"


def test_numbers_of_numpy_are_converted() -> None:
    verdict = check_verdict(Verdict(np.bool_(True), metrics={"a": np.float32(0.5), "b": np.int64(2), "c": np.bool_(1)}))  # type: ignore[arg-type]
    assert (verdict.ok, verdict.metrics) == (True, {"a": 0.5, "b": 2.0, "c": 1.0})
    reply = check_step_result(("", np.float32(0.5), np.bool_(True), False, {"metrics": {"a": np.float16(2)}}))
    assert (reply.reward, reply.info["metrics"]) == (0.5, {"a": 2.0})
    kinds = [verdict.ok, *verdict.metrics.values(), reply.reward, reply.info["metrics"]["a"]]
    assert [type(value) for value in kinds] == [bool, *[float] * 5]


@pytest.mark.parametrize("ok", [1, "no", None, re.match("a", "a")], ids=str)
def test_a_verdict_is_true_or_false(ok: Any) -> None:
    with pytest.raises(ContractError, match=r"check gave ok of .*; give True or False"):
        check_verdict(Verdict(ok))


@pytest.mark.parametrize("reward", [True, np.bool_(1), "1", 10**400, float("inf"), 1j], ids=str)
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(ContractError, match=r"step gave a reward of .*; give a number or None"):
        reward_of(reward, "step")


@pytest.mark.parametrize(
    "name",
    ["reward", "success", "turns", "done.n", "truncated: turns.n", "exact, turn 1", "reward, failures as 0", "pass^4"],
)
def test_metrics_do_not_replace_the_numbers_of_a_simulation(name: str) -> None:
    with pytest.raises(ContractError) as error:
        metrics_of({"price": 1, name: 1}, "step")
    assert str(error.value) == (
        f"step gave the metric {name}, which partita computes itself (reward and success from the reward and the "
        "verdict); choose another name"
    )


def test_the_names_of_a_simulation_are_all_protected() -> None:
    episode = Episode("a", "a", {}, 0, reward=1.0, rounds=1, status="done")
    episode.observe("?", gold="a")
    episode.act("a", (1,))
    numbers = column(outcomes_of([episode], repeats=1))
    assert len(numbers) == 9
    assert all(OWN_METRICS.fullmatch(name) for name in numbers)


def test_metrics_have_names_that_files_can_hold() -> None:
    with pytest.raises(ContractError, match="give numbers by name"):
        metrics_of({"\ud800": 1.0}, "step")


def test_a_column_prompt_of_another_type_is_for_the_environment_alone() -> None:
    world = EnvironmentWorld(Taker, max_turns=1, closer=BackgroundCloser())
    next(world.run(Episode("a", "a", {"prompt": 5, "questions": ["one"]}, 0)))


class Taker:
    """An environment that changes its task."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return task["questions"].pop(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


def test_an_environment_cannot_change_the_task_of_other_episodes() -> None:
    task = {"questions": ["one", "two"]}
    world = EnvironmentWorld(Taker, max_turns=1, closer=BackgroundCloser())
    for name in ("a", "b"):
        episode = Episode(name, name, task, 0)
        next(world.run(episode))
        assert [message["content"] for message in episode.messages] == ["two"]
    assert task == {"questions": ["one", "two"]}
