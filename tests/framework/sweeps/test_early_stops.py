"""Tests of early stops: trials are compared at the same share of their steps, as Optuna's pruners decide."""

import random
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from pydantic import TypeAdapter

from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
from partita.sweeps.early_stops import bracket_of, is_stopped
from partita_schema.sections.sweep import HyperbandPruner, Pruner

HALVING: dict[str, Any] = {"type": "successive_halving"}
MEDIAN: dict[str, Any] = {"type": "median", "startup_trials": 4}


def curve_of(values: Sequence[float], *, evaluations: int | None = None) -> tuple[TrialEvaluation, ...]:
    """Return the curve of a trial that takes a step between evaluations."""
    steps = evaluations or len(values)
    return tuple(TrialEvaluation(step / steps, step, value) for step, value in enumerate(values, start=1))


def done(number: int, values: Sequence[float]) -> Trial:
    return Trial(number, {"seed": number}, result=TrialResult("done", values[-1], curve=curve_of(values)))


def stopped_at(settings: dict[str, Any], known: Sequence[Trial], values: Sequence[float]) -> list[float]:
    """Return the shares at which a trial with these values would be stopped."""
    pruner, curve = TypeAdapter[Any](Pruner).validate_python(settings), curve_of(values)
    parts = [curve[:count] for count in range(1, len(curve) + 1)]
    stops = [is_stopped(pruner, part, number=len(known), known=known, direction="minimize") for part in parts]
    return [part[-1].share for part, stop in zip(parts, stops, strict=True) if stop]


@pytest.mark.parametrize("settings", [HALVING, MEDIAN])
@pytest.mark.parametrize("evaluations", [2, 3, 4, 7])
def test_a_bad_trial_is_stopped_whatever_its_number_of_evaluations(settings: dict[str, Any], evaluations: int) -> None:
    known = [done(number, [0.5, 0.3, 0.1]) for number in range(8)]
    shares = stopped_at(settings, known, [99.0] * evaluations)
    first = next(step / evaluations for step in range(1, evaluations + 1) if step / evaluations >= 1 / 3)
    assert shares[0] == first
    assert stopped_at(settings, known, [0.01] * evaluations) == []


@pytest.mark.parametrize("settings", [HALVING, MEDIAN])
def test_the_result_of_a_finished_trial_does_not_count_before_its_share(settings: dict[str, Any]) -> None:
    known = [done(number, [0.5]) for number in range(4)]
    assert stopped_at(settings, known, [0.6, 0.4, 0.2, 0.01]) == []


def test_others_count_with_their_last_value_before_an_evaluation_also_if_it_is_old() -> None:
    known = [done(number, [0.5, 0.1]) for number in range(4)]
    assert stopped_at(MEDIAN, known, [0.6, 0.6, 0.4, 0.2]) == [0.5]
    assert stopped_at(MEDIAN, known, [0.6, 0.45, 0.45, 0.45]) == []


def test_the_median_is_that_of_enough_trials_with_a_value_at_this_share() -> None:
    late, early = [done(number, [0.1]) for number in range(7)], [done(number, [0.1] * 4) for number in range(7, 11)]
    assert stopped_at(MEDIAN, [*late, *early[:3]], [9.0] * 4) == []
    assert stopped_at(MEDIAN, [*late, *early], [9.0] * 4) == [0.25, 0.5, 0.75]


def test_a_trial_that_was_stopped_competes_at_the_decisions_that_it_reached() -> None:
    stopped = [
        Trial(number, {}, result=TrialResult("pruned", curve=curve_of([0.2], evaluations=10))) for number in range(6)
    ]
    ten = [0.3] * 10
    assert stopped_at(HALVING, stopped, ten) == [0.1]
    assert stopped_at(HALVING, [], ten) == []


def test_a_decision_of_halving_is_taken_at_the_first_evaluation_after_its_share() -> None:
    known = [done(number, [0.1] * 20) for number in range(4)]
    assert stopped_at(HALVING, known, [9.0] * 20) == [0.1, 0.3, 0.9]
    assert stopped_at(HALVING, known, [9.0] * 4) == [0.25, 0.5]


def test_hyperband_starts_the_decisions_of_a_trial_where_optuna_does() -> None:
    section = HyperbandPruner(type="hyperband", min_share=0.03, reduction_factor=2)
    study = optuna.create_study(
        study_name="sweep",
        pruner=optuna.pruners.HyperbandPruner(min_resource=30, max_resource=1000, reduction_factor=2),
    )
    brackets = []
    for _ in range(40):
        trial = study.ask()
        power = 0
        while "completed_rung_0" not in study.trials[-1].system_attrs:
            trial.report(0.0, 30 * 2**power)
            trial.should_prune()
            power += 1
        brackets.append(power - 1)
    assert [bracket_of(section, number) for number in range(40)] == brackets
    assert len(set(brackets)) > 2


@pytest.mark.parametrize(
    ("settings", "pruner"),
    [
        (HALVING, optuna.pruners.SuccessiveHalvingPruner(min_resource=100, reduction_factor=3)),
        (MEDIAN, optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=100)),
        ({"type": "hyperband"}, optuna.pruners.HyperbandPruner(min_resource=100, max_resource=1000)),
    ],
)
def test_trials_with_the_same_evaluations_are_stopped_where_optuna_stops_them(
    settings: dict[str, Any], pruner: optuna.pruners.BasePruner
) -> None:
    rng = random.Random(3)
    study = optuna.create_study(study_name="sweep", pruner=pruner)
    known: list[Trial] = []
    for number in range(30):
        values = [rng.random() + 1 / step for step in range(1, 11)]
        trial, count, stop = study.ask(), 0, False
        while not stop and count < 9:
            count += 1
            trial.report(values[count - 1], count * 100)
            stop = trial.should_prune()
        assert next(iter(stopped_at(settings, known, values)), None) == (count / 10 if stop else None)
        if not stop:
            trial.report(values[-1], 1000)
            trial.should_prune()
        study.tell(trial, None if stop else values[-1], state=optuna.trial.TrialState(2 if stop else 1))
        result = TrialResult(
            "pruned" if stop else "done", None if stop else 0.0, curve=curve_of(values)[: count + (not stop)]
        )
        known.append(Trial(number, {}, result=result))
