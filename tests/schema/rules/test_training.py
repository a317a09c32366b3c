"""Tests of the rules for combinations of values in the trainer section."""

from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.sections.trainer import FinetuneTrainer

from ..refusals import problems_of


def problems(**trainer: Any) -> list[str]:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "trainer": {"type": "finetune", **trainer},
    }
    return problems_of(raw)


def test_nesterov_needs_momentum() -> None:
    reported = problems(optimizer={"type": "sgd", "nesterov": True})
    assert len(reported) == 1
    assert "trainer.optimizer.nesterov: nesterov needs momentum; add momentum: 0.9" in reported[0]
    assert problems(optimizer={"type": "sgd", "nesterov": True, "momentum": 0.9}) == []
    assert problems(optimizer={"type": "muon", "nesterov": True}) == []


def test_betas_are_below_one() -> None:
    assert problems(optimizer={"betas": [1.0, 0.9]}) == [
        "trainer.optimizer.betas[0]: write a number of at least 0 and below 1; got 1.0"
    ]
    assert problems(optimizer={"betas": [0, 0.999]}) == []


def test_callbacks_need_a_training() -> None:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "callbacks": [{"type": "custom", "target": "mine:Callback"}],
    }
    message = "callbacks: they are called during training, and trainer.type is none; remove them"
    assert problems_of(raw) == [message]
    assert problems_of(raw | {"trainer": {"type": "finetune"}}) == []


@pytest.mark.parametrize("decay", ["none", "constant"])
def test_a_constant_learning_rate_has_no_minimum(decay: str) -> None:
    reported = problems(learning_rate_scheduler={"decay": decay, "min_ratio": 0.1})
    assert len(reported) == 1
    assert (
        f"trainer.learning_rate_scheduler.min_ratio: min_ratio has no effect with decay: {decay}; remove it"
        in reported[0]
    )
    assert problems(learning_rate_scheduler={"decay": "cosine", "min_ratio": 0.1}) == []


def test_no_trainer_trains_quantized_weights() -> None:
    custom = {"type": "custom", "target": "m:C"}
    raw = {
        "base_model": "m",
        "quantization": {"bits": 4},
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
    }
    with pytest.raises(ConfigError, match="quantization"):
        load_config({**raw, "trainer": custom})
    assert load_config({**raw, "trainer": {"type": "none"}}).config.trainer.type == "none"


def test_an_adapter_that_is_neither_trained_nor_loaded_is_refused() -> None:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "adapter": {"type": "lora"},
    }
    message = (
        "adapter: a new adapter has no effect with trainer: {type: none}; write trainer: {type: finetune}, or remove "
        "adapter"
    )
    assert problems_of(raw) == problems_of(raw | {"trainer": {"type": "none"}}) == [message]
    assert problems_of(raw | {"trainer": {"type": "finetune"}}) == []
    assert problems_of(raw | {"trainer": {"type": "finetine"}}) == [
        "trainer.type: got finetine; did you mean finetune?"
    ]
    assert problems_of(raw | {"adapter": {"type": "lora", "pretrained_adapter_weights": "runs/first/model"}}) == []


def trainer(**keys: Any) -> FinetuneTrainer:
    return FinetuneTrainer(type="finetune", **keys)


def test_a_limit_on_auto_needs_auto() -> None:
    message = "remove it, or write auto for batch_size or eval_batch_size"
    numbers: list[dict[str, Any]] = [{"batch_size": 8}, {"batch_size": 8, "eval_batch_size": 4}]
    for keys in numbers:
        assert problems(**keys, max_batch_size=64) == [
            f"trainer.max_batch_size: max_batch_size has no effect with batch_size: 8; {message}"
        ]
    for keys in [{}, {"batch_size": "auto"}, {"eval_batch_size": "auto"}, {"batch_size": 8, "eval_batch_size": "auto"}]:
        assert problems(**keys, max_batch_size=64) == []


def test_without_training_one_batch_size_is_used() -> None:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
    }
    keys = {"type": "none", "batch_size": 8}
    assert problems_of(raw | {"trainer": keys}) == []
    assert problems_of(raw | {"trainer": {"type": "none", "eval_batch_size": 4}}) == []
    assert problems_of(raw | {"trainer": keys | {"eval_batch_size": 4}}) == [
        "trainer.batch_size: batch_size has no effect beside eval_batch_size without training; remove one of them"
    ]


def test_a_mistyped_auto_with_a_limit_is_one_problem() -> None:
    reported = problems(batch_size=4, eval_batch_size="auot", max_batch_size=64)
    assert reported == ["trainer.eval_batch_size: got auot; did you mean auto?"]


def test_only_a_configured_batch_size_must_divide_the_effective_one() -> None:
    assert problems(effective_batch_size=18) == []
    assert problems(batch_size="auto", effective_batch_size=18) == []
    assert problems(batch_size=4, effective_batch_size=18) == [
        "trainer.effective_batch_size: effective_batch_size 18 is not a multiple of batch_size 4; write 16"
    ]


@pytest.mark.parametrize(
    ("keys", "batch_size", "batches"),
    [
        ({}, 1, 16),
        ({}, 16, 1),
        ({}, 24, 1),
        ({"batch_size": 5}, 5, 3),
        ({"effective_batch_size": 24}, 8, 3),
        ({"effective_batch_size": 24}, 48, 1),
        ({"gradient_accumulation_steps": 5}, 1, 5),
        ({"gradient_accumulation_steps": 5}, 64, 5),
    ],
)
def test_batches_of_a_step_for_a_size(keys: dict[str, Any], batch_size: int, batches: int) -> None:
    assert trainer(**keys).accumulation(batch_size) == batches


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({}, 16),
        ({"batch_size": "auto", "effective_batch_size": 24}, 24),
        ({"batch_size": 8, "effective_batch_size": 24}, 24),
        ({"batch_size": 5}, 15),
        ({"batch_size": 24}, 24),
        ({"gradient_accumulation_steps": 5}, None),
        ({"batch_size": 8, "gradient_accumulation_steps": 5}, None),
    ],
)
def test_rows_per_step_fixed_by_the_configuration(keys: dict[str, Any], rows: int | None) -> None:
    assert trainer(**keys).step_rows == rows


def test_a_memory_budget_limits_a_run_with_a_number_too() -> None:
    assert problems(batch_size=8, memory_budget="12GB") == []
    assert trainer(memory_budget="12 GB").memory_budget == "12 GB"
    assert problems(memory_budget=12) == ["trainer.memory_budget: got 12; write 12GB, or a share such as 0.5"]


def test_a_metric_of_label_scores_needs_scores() -> None:
    label = {"name": "kind", "type": "category", "decoder": {"labels": ["a", "b"]}}
    raw: dict[str, Any] = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [label],
        "trainer": {"type": "finetune", "validation_metric": "auroc"},
    }
    assert problems_of(raw) == [
        (
            "trainer.validation_metric: auroc needs a score for every label; write head: linear or decoder: "
            "{scoring: true} in the output"
        )
    ]
    scored = [{**label, "decoder": {"labels": ["a", "b"], "scoring": True}}]
    assert problems_of(raw | {"output_features": scored}) == []
    other = {"type": "finetune", "validation_metric": "kind.average_precison"}
    assert problems_of(raw | {"output_features": scored, "trainer": other}) == [
        "trainer.validation_metric: no metric is named kind.average_precison; did you mean kind.average_precision?"
    ]


def test_packed_rows_need_an_attention_that_separates_them() -> None:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "model_parameters": {"attention": "flash_attention_2"},
        "data": {"batching": {"type": "pack"}},
    }
    assert problems_of({**raw, "trainer": {"type": "finetune"}}) == [
        (
            "model_parameters.attention: rows are packed with sdpa or eager attention only, not with "
            "flash_attention_2; write sdpa, or data.batching: {type: bucket}"
        )
    ]
    assert problems_of({**raw, "trainer": {"type": "none"}}) == []


def test_a_metric_of_answers_needs_answers() -> None:
    [problem] = problems(evaluate_generated=False, validation_metric="bleu")
    assert problem == (
        "trainer.validation_metric: bleu needs answers, and evaluate_generated: false writes none; remove it, or write "
        "loss"
    )
    assert problems(evaluate_generated=False, validation_metric="loss") == []
    assert problems(validation_metric="bleu") == []


def test_schedule_free_adamw_keeps_its_rate_unless_decay_is_set() -> None:
    def decay(**scheduler: Any) -> str:
        optimizer = {"type": "schedule_free_adamw"}
        section = FinetuneTrainer(type="finetune", optimizer=optimizer, learning_rate_scheduler=scheduler)  # type: ignore[arg-type]
        return section.learning_rate_scheduler.decay

    assert (decay(), decay(warmup_steps=3), decay(decay="linear")) == ("constant", "constant", "linear")
    assert decay(decay="cosine") == "cosine"
    [problem] = problems(optimizer={"type": "schedule_free_adamw"}, learning_rate_scheduler={"min_ratio": 0.1})
    assert problem == (
        "trainer.learning_rate_scheduler.min_ratio: min_ratio has no effect with schedule_free_adamw unless decay is "
        "set; remove it"
    )


def test_fp16_excludes_muon_and_the_learning_rate_range_test() -> None:
    muon = problems(mixed_precision="fp16", optimizer={"type": "muon"})
    assert muon == ["trainer.mixed_precision: fp16 cannot be combined with optimizer.type: muon; write bf16 or no"]
    rates = problems(mixed_precision="fp16", learning_rate="auto")
    assert rates == ["trainer.mixed_precision: fp16 cannot be combined with learning_rate: auto; write bf16 or no"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("early_stop", 3),
        ("validation_metric", "exact_match"),
        ("steps_per_evaluation", 3),
        ("evaluations_per_epoch", 3),
    ],
)
def test_keys_of_evaluations_need_evaluations(key: str, value: Any) -> None:
    found = problems(skip_all_evaluation=True, **{key: value})
    assert found == [f"trainer.{key}: {key} needs evaluations; remove it or skip_all_evaluation"]
