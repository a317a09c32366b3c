"""Tests of the learning-rate schedule against its formulas."""

import math
from typing import get_args

import pytest

from partita_schema.sections.optimization import LearningRateScheduler
from partita_trainers.schedule import Schedule, learning_rate_share, warmup_steps


def shares(total: int, **options: object) -> list[float]:
    scheduler = LearningRateScheduler.model_validate(options)
    return [learning_rate_share(scheduler, step=step, total_steps=total) for step in range(1, total + 1)]


def test_the_default_warms_up_for_five_steps_and_falls_to_a_tenth() -> None:
    result = shares(100)
    assert result[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert result[-1] == pytest.approx(0.1)
    assert result[4:] == sorted(result[4:], reverse=True)


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_no_step_has_a_rate_of_zero(decay: str) -> None:
    for total in (1, 2, 30):
        assert min(shares(total, decay=decay, min_ratio=0.0, warmup_steps=0)) > 0


def test_cosine_is_half_way_in_the_middle() -> None:
    assert shares(100, warmup_steps=0, min_ratio=0.0)[49] == pytest.approx((1 + math.cos(math.pi * 50 / 101)) / 2)


@pytest.mark.parametrize(
    ("options", "step", "expected"),
    [
        ({"decay": "linear"}, 50, 1 - 50 / 101),
        ({"decay": "linear"}, 100, 1 / 101),
        ({"decay": "linear", "min_ratio": 0.2}, 100, 0.2),
        ({"decay": "constant"}, 100, 1.0),
        ({"decay": "none"}, 77, 1.0),
        ({"decay": "wsd"}, 90, 1.0),
        ({"decay": "wsd"}, 95, 60 / 101),
        ({"decay": "wsd"}, 100, 10 / 101),
        ({"decay": "exponential", "decay_rate": 0.5, "decay_steps": 10}, 30, 0.125),
        ({"decay": "exponential"}, 1, 0.96),
        ({"decay": "inverse_sqrt"}, 1, 1.0),
        ({"decay": "inverse_sqrt"}, 100, 1 / math.sqrt(100)),
    ],
)
def test_each_decay_follows_its_formula(options: dict[str, object], step: int, expected: float) -> None:
    assert shares(100, warmup_steps=0, **options)[step - 1] == pytest.approx(expected, abs=1e-9)


def test_inverse_sqrt_falls_from_the_end_of_the_warm_up() -> None:
    result = shares(100, decay="inverse_sqrt", warmup_steps=4)
    assert result[:4] == [0.25, 0.5, 0.75, 1.0]
    assert (result[15], result[99]) == pytest.approx((0.5, 0.2))


def test_warm_up_never_outlasts_the_run() -> None:
    assert shares(4, warmup_steps=10) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert warmup_steps(LearningRateScheduler(warmup_fraction=0.1), 40) == 4
    assert warmup_steps(LearningRateScheduler(), 40) == 1
    assert warmup_steps(LearningRateScheduler(), 50) == 5


@pytest.mark.parametrize("decay", get_args(LearningRateScheduler.model_fields["decay"].annotation))
@pytest.mark.parametrize("total", [1, 2, 3, 10, 1000])
def test_every_learning_rate_is_between_0_and_the_peak(decay: str, total: int) -> None:
    assert all(0 <= share <= 1 for share in shares(total, decay=decay))


def test_the_last_step_is_evaluated_and_saved_with_any_interval() -> None:
    schedule = Schedule(total=10, evaluate_every=4, checkpoint_every=3)
    steps = range(1, 11)
    assert [step for step in steps if schedule.evaluation_is_due(step)] == [4, 8, 10]
    assert [step for step in steps if schedule.checkpoint_is_due(step)] == [3, 6, 9, 10]
    rare = Schedule(total=10, evaluate_every=None, checkpoint_every=None)
    assert not any(rare.evaluation_is_due(step) for step in steps)
    assert [step for step in steps if rare.checkpoint_is_due(step)] == [10]
