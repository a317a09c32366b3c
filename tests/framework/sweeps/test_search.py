"""Tests of the choice of values and of early stops: functions of the trials before, as of Optuna."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
from partita.sweeps.importance import importances
from partita.sweeps.search import Search
from partita_schema.sections.sweep import SweepConfig, num_trials

SPACE: dict[str, Any] = {
    "rate": {"log_uniform": [1e-5, 1e-1]},
    "rank": [8, 16, {"type": "none"}],
    "layers": {"int": [0, 10], "step": 5},
}


def search_of(*, parameters: dict[str, Any] | None = None, **section: Any) -> Search:
    return Search(SweepConfig.model_validate({"parameters": parameters or SPACE, **section}), "minimize", seed=1)


def loss_of(trial: Trial) -> float:
    values = trial.values
    return abs(math.log10(values["rate"]) + 3) + (values["rank"] != 16) + values["layers"] / 10


def run(search: Search, count: int, *, evaluations: int = 10) -> list[Trial]:
    """Return trials that were run one after another."""
    trials: list[Trial] = []
    for number in range(count):
        trial = Trial(number, search.values(trials))
        curve: list[TrialEvaluation] = []
        stop = False
        for step in range(1, evaluations + 1):
            curve.append(TrialEvaluation(step / evaluations, step, loss_of(trial) + 1 / step))
            stop = search.should_stop(trials, curve)
            if stop:
                break
        state, value = ("pruned", None) if stop else ("done", loss_of(trial))
        result = TrialResult(state, value, curve=tuple(curve))  # type: ignore[arg-type]
        trials.append(replace(trial, result=result))
    return trials


def values_of(trials: Sequence[Trial]) -> list[Any]:
    return [dict(trial.values) for trial in trials]


def test_a_grid_has_every_combination_in_order() -> None:
    search = search_of(parameters={"a": [1, 2], "b": {"int": [0, 1]}, "c": ["x"]}, sampler="grid")
    combinations = [{"a": a, "b": b, "c": "x"} for a in (1, 2) for b in (0, 1)]
    assert [search.grid_values(number) for number in range(4)] == combinations


def test_a_grid_of_a_long_range_takes_no_memory() -> None:
    search = search_of(parameters={"a": {"int": [0, 10**30]}, "b": [1, 2]}, sampler="grid", trials=4)
    assert num_trials(search.sweep) == 4
    assert search.grid_values(3) == {"a": 1, "b": 2}
    assert search.grid_values(2 * 10**30) == {"a": 10**30, "b": 1}
    assert num_trials(search_of(parameters={"seed": {"int": [0, 10**30]}}, sampler="random").sweep) == 16


def test_values_are_within_their_ranges_and_have_their_types() -> None:
    for trial in run(search_of(sampler="random"), 20, evaluations=1):
        assert 1e-5 <= trial.values["rate"] <= 1e-1
        assert trial.values["rank"] in SPACE["rank"]
        assert trial.values["layers"] in (0, 5, 10)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_the_same_seed_chooses_the_same_values_and_another_seed_others(sampler: str) -> None:
    search = search_of(sampler=sampler)
    first = values_of(run(search, 12, evaluations=1))
    assert values_of(run(search, 12, evaluations=1)) == first
    assert values_of(run(replace(search, seed=2), 12, evaluations=1)) != first


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_another_order_of_the_parameters_in_the_file_gives_the_same_trials(sampler: str) -> None:
    space = SPACE | ({"rate": [1e-5, 1e-3, 1e-1]} if sampler == "grid" else {})
    search = search_of(parameters=space, sampler=sampler)
    other = search_of(parameters=dict(reversed(space.items())), sampler=sampler)
    trials, same = (run(one, 12, evaluations=1) for one in (search, other))
    assert [trial.name for trial in same] == [trial.name for trial in trials]
    assert values_of(same) == values_of(trials)
    assert list(same[0].values) == list(reversed(space)), "tables name the parameters as the file does"


def test_tpe_uses_results_but_not_those_of_trials_that_may_be_running() -> None:
    search = search_of(max_concurrent_trials=4)
    trials = run(search, 20, evaluations=1)
    unknown = [replace(trial, result=None) if trial.number >= 17 else trial for trial in trials]
    assert search.values(unknown) == search.values(trials)
    worse = replace(trials[16], result=TrialResult("done", 100.0))
    better = replace(trials[16], result=TrialResult("done", -100.0))
    assert search.values([*trials[:16], worse, *trials[17:]]) != search.values([*trials[:16], better, *trials[17:]])


def test_tpe_finds_better_values_than_random_ones() -> None:
    best = {
        sampler: sum(
            min(loss_of(one) for one in run(replace(search_of(sampler=sampler), seed=seed), 24, evaluations=1))
            for seed in range(4)
        )
        for sampler in ("random", "tpe")
    }
    assert best["tpe"] < best["random"]


def test_trials_of_a_grid_or_at_random_wait_for_none_and_those_of_tpe_for_all_but_the_last_ones() -> None:
    assert search_of(sampler="random").awaited(9) == 0
    assert search_of(max_concurrent_trials=4).awaited(9) == 6
    assert search_of(max_concurrent_trials=1).awaited(9) == 9
    assert search_of(sampler="random", pruner={"type": "median"}, max_concurrent_trials=2).awaited(9) == 8


@pytest.mark.parametrize("pruner", ["hyperband", "successive_halving", "median"])
def test_a_pruner_stops_some_trials_early_and_never_the_best_one(pruner: str) -> None:
    search = search_of(sampler="random", pruner={"type": pruner})
    trials = run(search, 16)
    assert run(search, 16) == trials
    results = [trial.result for trial in trials if trial.result is not None]
    assert {result.state for result in results} == {"done", "pruned"}
    assert all(len(result.curve) < 10 for result in results if result.state == "pruned")
    best = min(trials, key=loss_of)
    assert best.result is not None
    assert best.result.state == "done"


def test_a_pruner_does_not_use_the_results_of_trials_that_may_be_running() -> None:
    search = search_of(sampler="random", pruner={"type": "successive_halving"}, max_concurrent_trials=3)
    trials = run(search, 8)
    curve = [TrialEvaluation(0.1, 1, 1.5)]
    unknown = [replace(trial, result=None) if trial.number >= 6 else trial for trial in trials]
    assert search.should_stop(unknown, curve) == search.should_stop(trials, curve)


def test_a_pruner_counts_a_trial_that_was_repeated_once() -> None:
    search = search_of(pruner={"type": "median", "startup_trials": 3}, max_concurrent_trials=1)
    curve = (TrialEvaluation(0.5, 1, 1.0), TrialEvaluation(1.0, 2, 1.0))
    trials = [Trial(number, {}, result=TrialResult("done", 1.0, curve=curve)) for number in range(3)]
    worse = [TrialEvaluation(0.5, 1, 2.0)]
    assert search.should_stop(trials, worse)
    assert not search.should_stop([*trials[:2], replace(trials[2], repeats=0)], worse)


def test_a_trial_without_a_pruner_is_never_stopped() -> None:
    assert search_of().should_stop([], [TrialEvaluation(0.5, 1, 1e9)]) is False


def test_importance_belongs_to_the_parameter_that_decides() -> None:
    trials = run(search_of(sampler="random"), 24, evaluations=1)
    decided = [
        replace(trial, result=TrialResult("done", abs(math.log10(trial.values["rate"]) + 3))) for trial in trials
    ]
    shares = importances(search_of(sampler="random"), decided)
    assert next(iter(shares)) == "rate"
    assert shares["rate"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert importances(search_of(), decided[:7]) == {}
