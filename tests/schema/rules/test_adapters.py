"""Tests of the rules for adapters."""

from typing import Any

import pytest

from ..refusals import problems_of


def problems(base_model: Any = "m", **sections: Any) -> list[str]:
    raw = {
        "base_model": base_model,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return problems_of(raw | sections)


@pytest.mark.parametrize("type_", ["prompt_tuning", "prefix_tuning", "p_tuning"])
def test_virtual_tokens_are_neither_packed_nor_merged(type_: str) -> None:
    adapter = {"type": type_, "postprocessor": {"merge_adapter_into_base_model": True}}
    found = problems(adapter=adapter, data={"batching": {"type": "pack"}})
    assert sorted(found) == [
        (
            "adapter.postprocessor.merge_adapter_into_base_model: virtual tokens are not weights and cannot be merged; "
            "remove it"
        ),
        (
            f"data.batching.type: rows cannot be packed under the adapter {type_}: its virtual tokens would stand once "
            "in each sequence, not before each row; write data.batching: {type: bucket}"
        ),
    ]


def test_a_prefix_in_the_cache_excludes_beams_and_recomputing() -> None:
    sections = {
        "adapter": {"type": "prefix_tuning"},
        "generation": {"num_beams": 2},
        "trainer": {"type": "finetune", "gradient_checkpointing": True},
    }
    assert sorted(problems(**sections)) == [
        "generation.num_beams: beam search does not work with prefix_tuning; write num_beams: 1",
        (
            "trainer.gradient_checkpointing: prefix_tuning lives in the cache, which recomputing leaves out; write "
            "gradient_checkpointing: false, or adapter: {type: prompt_tuning}"
        ),
    ]
    assert problems(**sections | {"adapter": {"type": "prompt_tuning"}}) == []


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("orthogonal", "orthogonal does not work on a quantized base; write init: default or loftq"),
        (
            "pissa",
            (
                "pissa changes the base weights, and quantized ones cannot be changed; write init: loftq or default, "
                "or remove quantization"
            ),
        ),
    ],
)
def test_inits_that_change_the_base_are_refused_on_quantized_weights(init: str, message: str) -> None:
    sections: dict[str, Any] = {"adapter": {"type": "lora", "init": init}, "quantization": {"bits": 4}}
    assert problems(**sections) == [f"adapter.init: {message}"]


@pytest.mark.parametrize(
    ("kind", "key", "value"), [("lora", "init", "pissa"), ("prompt_tuning", "init_text", "Answer")]
)
def test_a_trained_adapter_is_not_initialized(kind: str, key: str, value: str) -> None:
    adapter = {"type": kind, "pretrained_adapter_weights": "./trained", key: value}
    assert problems(adapter=adapter) == [
        f"adapter.{key}: {key} is for a new adapter, and pretrained_adapter_weights loads a trained one; remove {key}"
    ]
    assert problems(adapter=adapter | {key: None if key == "init_text" else "default"}) == []


def test_loftq_fits_quantized_weights_once() -> None:
    adapter = {"type": "lora", "init": "loftq", "loftq_iterations": 3}
    assert problems(adapter=adapter, quantization={"bits": 4}) == [
        "adapter.loftq_iterations: a quantized base allows 1, its weights stay as they are; write 1"
    ]


def test_olora_does_not_work_on_a_new_gpt2() -> None:
    adapter = {"type": "lora", "init": "olora"}
    assert problems({"type": "scratch", "architecture": "gpt2"}, adapter=adapter) == [
        "adapter.init: olora does not work on layers of gpt2; write init: pissa"
    ]
    assert problems({"type": "scratch"}, adapter=adapter) == []


@pytest.mark.parametrize(
    "keys",
    [{"target_modules": "("}, {"exclude_modules": "("}, {"rank_pattern": {"(": 8}}, {"alpha_pattern": {"(": 1}}],
    ids=lambda keys: next(iter(keys)),
)
def test_patterns_of_module_names_are_regular_expressions(keys: dict[str, Any]) -> None:
    expected = "'(' is not a regular expression (missing ), unterminated subpattern at position 0); fix the pattern"
    assert problems(adapter={"type": "lora", **keys}) == [f"adapter.{next(iter(keys))}: {expected}"]


def test_a_list_of_target_modules_is_not_empty() -> None:
    expected = ["adapter.target_modules: the list is empty; write at least 1 of them"]
    assert problems(adapter={"type": "lora", "target_modules": []}) == expected


def test_a_seed_is_one_that_numpy_accepts() -> None:
    assert problems(seed=2**32) == ["seed: write an integer from 0 to 4294967295; got 4294967296"]
    assert problems(seed=2**32 - 1) == []


@pytest.mark.parametrize("key", ["beta1", "beta2"])
@pytest.mark.parametrize("value", [0, 1])
def test_smoothing_factors_of_adalora_are_those_that_peft_accepts(key: str, value: int) -> None:
    found = problems(adapter={"type": "adalora", key: value})
    assert found == [f"adapter.{key}: write a number above 0 and below 1; got {value}"]
