"""Tests of settings that sharding does not support: reported with key and advice."""

from typing import Any

import pytest

from partita_schema.load import load_config

from ..refusals import last_line_of

FILE: dict[str, Any] = {
    "base_model": "base",
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "trainer": {"type": "finetune", "batch_size": 4},
    "backend": {"type": "torchrun", "processes": 2, "sharding": "full"},
}
AUTO = (
    "trainer.batch_size: auto cannot try sizes with backend.sharding: a process that runs out of memory would leave "
    "the others waiting for its part of the weights; write a number"
)


def problem_text(**sections: Any) -> str:
    return last_line_of(FILE | sections)


@pytest.mark.parametrize("kind", ["torchrun", "ray"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "schedule_free_adamw"])
def test_plain_training_can_be_sharded(kind: str, optimizer: str) -> None:
    trainer = FILE["trainer"] | {"optimizer": {"type": optimizer}, "mixed_precision": "bf16"}
    config = load_config(FILE | {"backend": {"type": kind, "sharding": "full"}, "trainer": trainer}).config

    assert config.backend.sharding == "full"  # type: ignore[union-attr]


def test_a_token_budget_is_accepted_as_batch_size() -> None:
    batching = {"batching": {"type": "token_budget", "max_tokens": 512}}

    load_config(FILE | {"trainer": {"type": "finetune"}, "data": batching})
    assert problem_text(trainer={"type": "finetune"}, data={"batching": {"type": "token_budget"}}) == AUTO


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"trainer": {"type": "finetune"}}, AUTO),
        (
            {"trainer": {"type": "none"}},
            "backend.sharding: only training shares the weights of a model, and trainer.type is none; remove it",
        ),
        (
            {"trainer": FILE["trainer"] | {"learning_rate": "auto"}},
            (
                "trainer.learning_rate: auto restores the whole model after its search; write a number with "
                "backend.sharding"
            ),
        ),
        (
            {"trainer": FILE["trainer"] | {"optimizer": {"type": "muon"}}},
            (
                "trainer.optimizer.type: backend.sharding supports adamw, adam, sgd, schedule_free_adamw; write one "
                "of them"
            ),
        ),
        (
            {"trainer": FILE["trainer"] | {"mixed_precision": "fp16"}},
            "trainer.mixed_precision: fp16 cannot be combined with backend.sharding; write bf16 or no",
        ),
        (
            {"trainer": FILE["trainer"] | {"compile": True}},
            "trainer.compile: compile cannot be combined with backend.sharding; remove one of them",
        ),
        (
            {"adapter": {"type": "lora"}, "quantization": {"bits": 4}},
            "quantization: quantized weights cannot be cut into parts; remove backend.sharding, or quantization",
        ),
        (
            {"adapter": {"type": "adalora"}},
            "adapter.type: adalora looks at whole matrices; write lora, or remove backend.sharding",
        ),
    ],
)
def test_settings_that_need_the_whole_model_are_refused(sections: dict[str, Any], text: str) -> None:
    assert problem_text(**sections) == text
