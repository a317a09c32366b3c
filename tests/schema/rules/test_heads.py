"""Tests of the rules for outputs that a head predicts."""

from typing import Any

import pytest

from ..refusals import problems_of

GENERATED = "a head predicts the value and nothing is generated"


def problems(output: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    label = {"name": "label", "type": "category", "head": "linear", "decoder": {"labels": ["a", "b"]}}
    raw = {
        "base_model": "m",
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [label if output is None else output],
        "trainer": {"type": "finetune"},
    }
    return problems_of(raw | sections)


def number(**keys: Any) -> dict[str, Any]:
    return {"name": "size", "type": "number", "head": "linear", **keys}


def of_category(**keys: Any) -> dict[str, Any]:
    return {"name": "label", "type": "category", "head": "linear", **keys}


@pytest.mark.parametrize("kind", ["category", "set", "number"])
def test_labels_sets_and_numbers_can_have_a_head(kind: str) -> None:
    assert problems({"name": "label", "type": kind, "head": "linear"}) == []


def test_other_heads_and_other_types_are_refused() -> None:
    assert problems(of_category(head="logistic")) == ["output_features[0].head: write linear; got 'logistic'"]
    [text] = problems({"name": "label", "type": "text", "head": "linear"})
    assert text.startswith("output_features[0].head: head has no effect with type: text; remove it")


@pytest.mark.parametrize(
    ("output", "key"),
    [
        (of_category(decoder={"scoring": True}), "decoder.scoring"),
        (of_category(decoder={"match": {"a": {"value": "x"}}}), "decoder.match"),
        (of_category(decoder={"labels": ["a", "b"], "fallback_label": "a"}), "decoder.fallback_label"),
        (of_category(preprocessing={"max_sequence_length": 3}), "preprocessing.max_sequence_length"),
        ({"name": "l", "type": "set", "head": "linear", "decoder": {"constrain": True}}, "decoder.constrain"),
        (number(decoder={"regex": "[0-9]+"}), "decoder.regex"),
        (number(decoder={"pick": "last"}), "decoder.pick"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_read_generated_text_are_refused(output: dict[str, Any], key: str) -> None:
    name = key.partition(".")[2]
    advice = f"{GENERATED}, so {name} has no effect; remove it"
    assert f"output_features[0].{key}: {advice}" in problems(output)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"prompt": {"task": "Say a."}},
            f"prompt.task: {GENERATED}, so task has no effect; write prompt.template, or remove it",
        ),
        (
            {"prompt": {"retrieval": {"type": "random"}}},
            f"prompt.retrieval: {GENERATED}, so retrieval has no effect; write prompt.template, or remove it",
        ),
        (
            {"prompt": {"chat": True}},
            "prompt.chat: a head reads the text as it is, without a chat template; remove chat",
        ),
        (
            {"generation": {"max_new_tokens": 3}},
            f"generation.max_new_tokens: {GENERATED}, so max_new_tokens has no effect; remove it",
        ),
        (
            {"data": {"batching": {"type": "pack"}}},
            "data.batching.type: a head reads one row per sequence, so rows are not packed; write bucket",
        ),
        ({"adapter": {"type": "prompt_tuning"}}, "adapter.type: prompt_tuning does not train the head; write lora"),
        (
            {"trainer": {"type": "finetune", "completion_only_loss": False}},
            "trainer.completion_only_loss: the loss is that of the head, not of tokens; remove it",
        ),
        (
            {"backend": {"type": "endpoint", "url": "http://x"}, "trainer": {"type": "none"}},
            "backend.type: a server generates text and has no head; remove backend, or head from the output",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_generated_text_in_other_sections_are_refused(sections: dict[str, Any], problem: str) -> None:
    assert problem in problems(**sections)


def test_a_head_predicts_a_single_output() -> None:
    outputs = [of_category(), {"name": "note", "type": "text"}]

    assert problems(output_features=outputs) == [
        "output_features[0].head: a head predicts a single output; remove head, or write one file for each output"
    ]


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_a_new_encoder_decoder_has_no_head(architecture: str) -> None:
    assert problems(base_model={"type": "scratch", "architecture": architecture}) == [
        (
            f"output_features[0].head: {architecture} is an encoder-decoder, which writes its answers; remove head, or "
            "choose an encoder or decoder"
        )
    ]


def test_a_new_encoder_needs_outputs_that_can_have_a_head() -> None:
    scratch = {"type": "scratch", "architecture": "bert"}

    assert problems({"name": "note", "type": "json"}, base_model=scratch) == [
        (
            "output_features[0].type: bert is an encoder, which writes no text, and a json is written; write type: "
            "category, set, number, tags, score or embedding, or choose a decoder as base_model"
        )
    ]
    assert problems({"name": "label", "type": "set"}, base_model=scratch) == []


def test_a_new_encoder_has_heads_also_if_the_file_does_not_say_so() -> None:
    scratch = {"type": "scratch", "architecture": "bert"}
    label = {"name": "label", "type": "category", "decoder": {"labels": ["a", "b"]}}
    wrong = {"generation": {"max_new_tokens": 3}, "data": {"batching": {"type": "pack"}}}

    found = problems(base_model=scratch, output_features=[label, {"name": "size", "type": "number"}], **wrong)
    assert found == [
        "output_features[0].head: a head predicts a single output; write one file for each output",
        f"generation.max_new_tokens: {GENERATED}, so max_new_tokens has no effect; remove it",
        "data.batching.type: a head reads one row per sequence, so rows are not packed; write bucket",
    ]
    metric = {"trainer": {"type": "finetune", "validation_metric": "auroc"}}
    assert problems(base_model=scratch, output_features=[label], **metric) == []


def test_a_type_that_needs_a_head_is_not_told_to_remove_it() -> None:
    score = {"name": "relevance", "type": "score"}
    inputs = [{"name": "query", "type": "text"}, {"name": "document", "type": "text"}]

    assert problems(score, input_features=inputs, base_model={"type": "scratch", "architecture": "t5"}) == [
        "output_features[0].head: t5 is an encoder-decoder, which writes its answers; choose an encoder or decoder"
    ]


def test_a_threshold_of_a_new_model_needs_a_head() -> None:
    label = {"name": "label", "type": "set", "decoder": {"labels": ["a", "b"], "threshold": 0.4}}

    assert problems(label, base_model={"type": "scratch"}) == [
        (
            "output_features[0].decoder.threshold: threshold is for probabilities of a head; write head: linear next "
            "to it, or remove it"
        )
    ]
    assert problems(label, base_model={"type": "scratch", "architecture": "bert"}) == []


def test_a_bag_of_words_has_no_head() -> None:
    bag = {"base_model": {"type": "embedding_bag"}, "trainer": {"type": "hogwild"}}

    assert problems(**bag) == ["base_model: a bag of words is a classifier without a head; remove head from the output"]


def test_templates_system_messages_and_limits_of_inputs_are_allowed() -> None:
    inputs = [{"name": "text", "type": "text", "preprocessing": {"max_sequence_length": 30}}]

    assert problems(input_features=inputs, prompt={"template": "Review: {text}"}) == []
