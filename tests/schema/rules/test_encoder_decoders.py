"""Tests of the rules for encoder-decoders."""

from typing import Any

import pytest

from ..refusals import problems_of

DIALOGUE = {"input_features": [{"name": "messages", "type": "dialogue"}]}


def problems(architecture: str = "t5", **sections: Any) -> list[str]:
    raw = {
        "base_model": {"type": "scratch", "architecture": architecture},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "summary", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return problems_of(raw | sections)


def adapter(**keys: Any) -> dict[str, Any]:
    return {"adapter": keys}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"data": {"batching": {"type": "pack"}}},
            (
                "data.batching.type: pack joins rows in one sequence, and the rows of an encoder-decoder have two "
                "sides; write type: bucket, or token_budget"
            ),
        ),
        (
            {"trainer": {"type": "finetune", "completion_only_loss": False}},
            (
                "trainer.completion_only_loss: the prompt of an encoder-decoder is read by the encoder, which predicts "
                "nothing; write true"
            ),
        ),
        (
            DIALOGUE | {"data": {"dialogue": {"mode": "packed_dialogue"}}},
            (
                "data.dialogue.mode: packed_dialogue puts all answers of a dialogue in one sequence, and an "
                "encoder-decoder answers once per row; write mode: squash"
            ),
        ),
        (
            {"prompt": {"chat": True}},
            (
                "prompt.chat: a chat template writes prompt and answer as one text, and an encoder-decoder has two; "
                "write chat: false"
            ),
        ),
        (
            {"input_features": []},
            (
                "input_features: an encoder-decoder reads a prompt and writes an answer; write an input feature, or "
                "choose a causal language model"
            ),
        ),
        (
            adapter(type="lora", init="corda"),
            (
                "adapter.init: corda looks at the activations of a decoder alone, and this model also has an encoder; "
                "write init: default or pissa"
            ),
        ),
        (
            {"model_parameters": {"neftune_noise_alpha": 5}},
            (
                "model_parameters.neftune_noise_alpha: NEFTune is defined for causal models, and this is an "
                "encoder-decoder; remove it"
            ),
        ),
        (
            {"generation": {"guidance_scale": 2}},
            "generation.guidance_scale: it is defined for causal models, and this is an encoder-decoder; remove it",
        ),
        (
            {"output_features": [{"name": "facts", "type": "json", "decoder": {"constrain": True}}]},
            (
                "output_features[0].decoder.constrain: answers are constrained by a decoder alone, and this model also "
                "has an encoder; remove constrain"
            ),
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.partition(":")[0],
)
@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_what_two_sides_cannot_do_is_refused(architecture: str, sections: dict[str, Any], problem: str) -> None:
    assert problems(architecture, **sections) == [problem]


@pytest.mark.parametrize("type_", ["prompt_tuning", "prefix_tuning", "p_tuning"])
def test_virtual_tokens_are_refused(type_: str) -> None:
    assert problems(**adapter(type=type_)) == [
        (
            f"adapter.type: the virtual tokens of {type_} precede one text, and an encoder-decoder has two; write "
            "type: lora"
        )
    ]


def test_all_conflicts_are_reported_at_once() -> None:
    outputs = [{"name": "action", "type": "category"}, {"name": "reply", "type": "text", "column": "content"}]
    found = problems(
        **DIALOGUE,
        output_features=outputs,
        data={"dialogue": {"answers": "in_sequence"}, "batching": {"type": "pack"}},
        generation={"guidance_scale": 2},
        model_parameters={"neftune_noise_alpha": 5},
        adapter={"type": "prompt_tuning"},
    )
    assert [problem.partition(":")[0] for problem in found] == [
        "data.batching.type",
        "data.dialogue.answers",
        "adapter.type",
        "model_parameters.neftune_noise_alpha",
        "generation.guidance_scale",
    ]


def test_a_decoder_may_do_all_of_it() -> None:
    assert problems("llama", generation={"guidance_scale": 2}, model_parameters={"neftune_noise_alpha": 5}) == []
    assert problems("llama", data={"batching": {"type": "pack"}}, **adapter(type="lora", init="eva")) == []
