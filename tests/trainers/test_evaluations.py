"""Tests of the evaluations of a fine-tuning, and of the default learning rate."""

from dataclasses import replace
from typing import Any

import pytest

from partita_schema.config import Config
from partita_trainers.finetune import Finetune

from .conftest import run

DURING, AT_THE_END, TEST = ("validation", False, 256), ("validation", True, None), ("test", True, None)


@pytest.mark.parametrize(
    ("trainer", "asked"),
    [
        ({}, [DURING, AT_THE_END, TEST]),
        ({"evaluate_test": False}, [DURING, AT_THE_END]),
        ({"evaluate_generated": True, "max_generated_rows": 7}, [("validation", True, 7), AT_THE_END, TEST]),
        ({"evaluate_generated": False}, [DURING, ("validation", False, None), ("test", False, None)]),
        ({"validation_metric": "rouge_l"}, [("validation", True, 256), AT_THE_END, TEST]),
        ({"skip_all_evaluation": True, "steps_per_evaluation": None}, []),
    ],
)
def test_answers_are_generated_if_configured(
    make_work: Any, trainer: dict[str, Any], asked: list[tuple[str, bool, int | None]]
) -> None:
    results = []

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        results.append((split, generated, max_rows))
        return {"loss": 1.0, "a.rouge_l": 0.5}

    work = make_work(evaluate=evaluate, **{"max_steps": 1, "steps_per_evaluation": 1, **trainer})
    work = replace(work, splits=("training", "validation", "test"))
    result = run(work)
    assert results == asked
    assert set(result.metrics) == {split for split, _, _ in asked}


@pytest.mark.parametrize(("generated", "during"), [(True, ("validation", True, None)), (False, DURING)])
def test_a_head_answers_all_rows(make_work: Any, generated: bool, during: tuple[str, bool, int | None]) -> None:
    results = []

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        results.append((split, generated, max_rows))
        return {"loss": 1.0}

    work = make_work(evaluate=evaluate, max_steps=1, steps_per_evaluation=1, evaluate_generated=generated)
    values = work.config.model_dump(mode="json", exclude_unset=True)
    values["output_features"] = [{"name": "a", "type": "category", "head": "linear"}]
    run(replace(work, config=Config.model_validate(values)))
    assert results == [during, ("validation", generated, None)]


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        ({"base_model": {"type": "scratch"}}, 1e-3),
        ({"base_model": "some/model"}, 2e-5),
        ({"base_model": "some/model", "adapter": {"type": "lora"}}, 2e-4),
        ({"base_model": {"type": "scratch"}, "adapter": {"type": "lora"}}, 2e-4),
    ],
)
def test_the_default_learning_rate_depends_on_the_trained_parameters(
    make_work: Any, model: dict[str, Any], rate: float
) -> None:
    work = make_work(learning_rate=None, max_steps=1, skip_all_evaluation=True)
    values = work.config.model_dump(mode="json", exclude_unset=True) | model
    Finetune(work.config.trainer).train(replace(work, config=Config.model_validate(values)))
    assert work.run.noted["learning_rate"] == rate
