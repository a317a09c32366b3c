"""Tests of the key under which a size is cached: it has what the memory or time of the work depends on, and no more."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.pipeline.size_key import NOT_OF_A_STEP, size_key
from partita_schema.config import Config
from partita_schema.sections.trainer import (
    CustomTrainer,
    FinetuneTrainer,
    KtoTrainer,
    PreferenceTrainer,
    RewardTrainer,
)
from partita_trainers.batch_size.probe import Volume

OF_A_STEP = {
    "type",
    "max_batch_size",
    "memory_budget",
    "optimizer",
    "gradient_accumulation_steps",
    "effective_batch_size",
    "gradient_clipping",
    "mixed_precision",
    "gradient_checkpointing",
    "compile",
    "completion_only_loss",
    "layers_to_freeze_regex",
}
"""Keys of `finetune` in the key of a training size."""


def key_of(**trainer: Any) -> dict[str, Any]:
    """Return the key of a training size with these keys of the trainer."""
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "question"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {"type": "finetune", **trainer},
        }
    )
    lm = SimpleNamespace(module=torch.nn.Linear(1, 1), device=torch.device("cpu"))
    pipeline: Any = SimpleNamespace(config=config, lm=lm, folder=Path())
    probe: Any = SimpleNamespace(
        purpose="training", prompt_tokens=9, new_tokens=0, max_rows=4, volume=lambda rows: Volume(batches=4, tokens=20)
    )
    memory: Any = SimpleNamespace(identity="a device")
    return size_key(pipeline, probe, memory, options=[], max_rows=None, with_training_state=False)


def test_it_is_decided_for_each_key_of_fine_tuning_whether_a_training_size_depends_on_it() -> None:
    assert FinetuneTrainer.model_fields.keys() == OF_A_STEP | NOT_OF_A_STEP
    assert not OF_A_STEP & NOT_OF_A_STEP


@pytest.mark.parametrize("section", [PreferenceTrainer, KtoTrainer, RewardTrainer, CustomTrainer])
def test_a_training_size_depends_on_all_keys_that_only_another_trainer_has(section: Any) -> None:
    assert not (section.model_fields.keys() - FinetuneTrainer.model_fields.keys()) & NOT_OF_A_STEP


@pytest.mark.parametrize(
    "trainer",
    [
        {"learning_rate": 0.1},
        {"learning_rate_scheduler": {"decay": "linear"}},
        {"max_steps": 7},
        {"epochs": 2},
        {"early_stop": 3},
        {"steps_per_checkpoint": 5, "keep_checkpoints": 1},
        {"skip_all_evaluation": True},
    ],
)
def test_rates_limits_checkpoints_and_evaluations_do_not_change_the_key(trainer: dict[str, Any]) -> None:
    assert key_of(**trainer) == key_of()


@pytest.mark.parametrize(
    "trainer",
    [
        {"optimizer": {"type": "sgd"}},
        {"gradient_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"gradient_accumulation_steps": 1},
        {"layers_to_freeze_regex": "embed"},
        {"type": "custom", "target": "module:Class", "options": {"learning_rate": 0.1}},
    ],
)
def test_what_a_step_computes_changes_the_key(trainer: dict[str, Any]) -> None:
    assert key_of(**trainer) != key_of()


def test_options_of_a_custom_trainer_change_the_key() -> None:
    custom = {"type": "custom", "target": "module:Class"}
    assert key_of(**custom, options={"learning_rate": 0.1}) != key_of(**custom, options={"learning_rate": 0.2})
