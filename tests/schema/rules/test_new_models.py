"""Tests of the rules for new models."""

from typing import Any

import pytest

from ..refusals import problems_of


def problems(base_model: dict[str, Any], **sections: Any) -> list[str]:
    raw = {
        "base_model": {"type": "scratch", **base_model},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return problems_of(raw | sections)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"hidden_size": 50},
            (
                "base_model.hidden_size: hidden_size 50 and num_attention_heads 4 give no even head width; write a "
                "hidden_size that is a multiple of 8, or other num_attention_heads"
            ),
        ),
        (
            {"hidden_size": 48, "architecture": "stablelm"},
            (
                "base_model.hidden_size: stablelm rotates 25% of each head, and 12 dimensions a head leave an odd "
                "number; write a hidden_size that is a multiple of 32"
            ),
        ),
        (
            {"num_key_value_heads": 3},
            (
                "base_model.num_key_value_heads: num_key_value_heads 3 does not divide num_attention_heads 4; write a "
                "divisor of 4"
            ),
        ),
        (
            {"num_key_value_heads": 2, "architecture": "gpt2"},
            "base_model.num_key_value_heads: gpt2 has no grouped-query attention; remove num_key_value_heads",
        ),
        (
            {"tokenizer": "word", "architecture": "qwen2"},
            (
                "base_model.tokenizer: transformers reads every tokenizer of qwen2 as a byte-level one; write "
                "tokenizer: bpe or byte, or architecture: qwen3"
            ),
        ),
    ],
    ids=["head width", "rotated", "divisor", "no groups", "own tokenizer"],
)
def test_impossible_models_are_refused(keys: dict[str, Any], problem: str) -> None:
    assert problems(keys) == [problem]


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "bert", "t5"])
def test_rope_scaling_needs_rotary_positions(architecture: str) -> None:
    scaling = {"model_parameters": {"rope_scaling": {"type": "linear", "factor": 2}}}
    outputs = {"output_features": [{"name": "label", "type": "category"}]}
    assert problems({"architecture": architecture}, **scaling, **outputs) == [
        f"model_parameters.rope_scaling: a {architecture} model has no rotary positions; remove it"
    ]
    assert problems({"architecture": "phi"}, **scaling) == []


def test_lengths_above_the_context_of_a_new_model_are_refused() -> None:
    limit = {"preprocessing": {"global_max_sequence_length": 100}}
    adapter = {"adapter": {"type": "prompt_tuning", "num_virtual_tokens": 8}}
    assert problems({"context_length": 100}, **limit) == []
    assert problems({"context_length": 100}, **limit, **adapter) == [
        "preprocessing.global_max_sequence_length: 100 is above the model's context of 92 tokens; write at most 92"
    ]
    assert problems({"context_length": 8}, **adapter) == [
        (
            "adapter.num_virtual_tokens: 8 virtual tokens leave no room for a row in the model's context of 8 tokens; "
            "write fewer"
        )
    ]
    chunks = {"data": {"batching": {"type": "chunk", "context_length": 2048}}, "input_features": []}
    assert problems({}, **chunks) == [
        "data.batching.context_length: 2,048 is above the model's context of 512 tokens; write at most 512"
    ]
    assert problems({"architecture": "t5", "context_length": 64}, **limit) == []
