"""Tests of the values that a run chooses, as far as the file shows them."""

from typing import Any

import pytest

from partita_schema.load import load_config
from partita_schema.open_values import AT_THE_START, open_values


def chosen(*, steps: int | None = None, base_model: Any = "m", **sections: Any) -> dict[str, str]:
    raw = {
        "base_model": base_model,
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    values = open_values(load_config(raw | sections).config, steps=steps)
    return {key.removeprefix("trainer."): value for key, value in values.items()}


@pytest.mark.parametrize(
    ("sections", "rate"),
    [
        ({}, "2e-05, the default for a pretrained model"),
        ({"base_model": {"type": "scratch"}}, "0.001, the default for a new model"),
        ({"adapter": {"type": "lora"}}, "0.0002, the default for an adapter"),
        ({"trainer": {"type": "finetune", "learning_rate": "auto"}}, "found by a range test before the first step"),
        ({"trainer": {"type": "finetune", "learning_rate": 0.1}}, None),
    ],
)
def test_the_learning_rate_is_the_default_or_found(sections: dict[str, Any], rate: str | None) -> None:
    assert chosen(**sections).get("learning_rate") == rate


@pytest.mark.parametrize(
    ("trainer", "steps", "warmup"),
    [
        ({}, None, "3 % of all steps, at least 5 of 50 or more; explain --data counts them"),
        ({}, 60, "5 of 60 steps"),
        ({"max_steps": 1000}, None, "30 of 1,000 steps"),
        ({"learning_rate_scheduler": {"warmup_fraction": 0.1}}, None, "10% of all steps; explain --data counts them"),
        ({"learning_rate_scheduler": {"warmup_fraction": 0.1}}, 60, "6 of 60 steps"),
        ({"learning_rate_scheduler": {"warmup_steps": 7}}, None, "7"),
    ],
)
def test_the_warm_up_follows_from_the_steps(trainer: dict[str, Any], steps: int | None, warmup: str) -> None:
    values = chosen(trainer={"type": "finetune", **trainer}, steps=steps)
    assert values["learning_rate_scheduler.warmup_steps"] == warmup


def test_a_number_for_training_is_also_that_of_evaluation_and_prediction() -> None:
    said = chosen(trainer={"type": "finetune", "batch_size": 8})
    assert said["eval_batch_size"] == "8, as batch_size; auto measures it"
    both = chosen(trainer={"type": "finetune", "batch_size": 8, "eval_batch_size": "auto"})
    assert both["eval_batch_size"] == AT_THE_START
    assert "eval_batch_size" not in chosen()


def test_keys_that_are_auto_are_found_when_the_run_begins() -> None:
    found = [key for key, value in chosen().items() if value == AT_THE_START]
    assert {"batch_size", "mixed_precision", "data.batching.type", "model_parameters.dtype"} <= set(found)
    assert not any(key.startswith("data.dialogue") for key in found)


def test_nothing_is_chosen_for_a_run_that_trains_nothing() -> None:
    assert chosen(trainer={"type": "none"}) == {}
