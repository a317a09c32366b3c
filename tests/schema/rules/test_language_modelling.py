"""Tests of the rules for configurations without inputs and for chunks of text."""

from typing import Any

import pytest

from partita_schema.load import load_config
from partita_schema.sections.batching import ChunkBatching

from ..refusals import problems_of

FILE: dict[str, Any] = {
    "base_model": "m",
    "output_features": [{"name": "text", "type": "text"}],
    "trainer": {"type": "finetune"},
}
CHUNK = {"batching": {"type": "chunk"}}


def test_a_text_output_without_inputs_is_language_modelling() -> None:
    config = load_config(FILE | {"data": CHUNK}).config

    assert config.plain_text
    assert config.data.batching == ChunkBatching(type="chunk")


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"batching": {"type": "bucket"}}, "preprocessing": {"global_max_sequence_length": 64}},
        {"data": {"batching": {"type": "pack"}}},
        {"data": {"batching": {"type": "chunk", "isolate_documents": True, "shuffle": False}}},
        {"trainer": {"type": "none"}},
        {"generation": {"max_new_tokens": 8}},
    ],
    ids=str,
)
def test_settings_that_language_modelling_supports(sections: dict[str, Any]) -> None:
    load_config(FILE | sections)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"output_features": [{"name": "a", "type": "category"}]},
            "input_features: an output of type category without an input; name the columns that the model sees",
        ),
        (
            {"output_features": [{"name": "a", "type": "text"}, {"name": "b", "type": "text"}]},
            "input_features: several outputs without an input; name the columns that the model sees",
        ),
        (
            {"base_model": {"type": "embedding_bag"}, "trainer": {"type": "hogwild"}},
            "input_features: a bag of words has no input; name the columns that it sees",
        ),
        (
            {"prompt": {"system": "Be brief."}},
            "prompt.system: system has no effect without input_features; add them, or remove system",
        ),
        (
            {"prompt": {"chat": True}},
            "prompt.chat: chat has no effect without input_features; add them, or remove chat",
        ),
        (
            {"output_features": [{"name": "text", "type": "text", "preprocessing": {"max_sequence_length": 9}}]},
            (
                "output_features[0].preprocessing.max_sequence_length: documents are limited by "
                "preprocessing.global_max_sequence_length; write that instead"
            ),
        ),
        (
            {"trainer": {"type": "none"}, "backend": {"type": "endpoint", "url": "http://localhost:1/v1"}},
            "backend: a server computes no loss of a text; remove backend, or add input_features",
        ),
        (
            {"trainer": {"type": "finetune", "evaluate_generated": True}},
            "trainer.evaluate_generated: there is no prompt to answer without input_features; remove it",
        ),
        (
            {"trainer": {"type": "finetune", "validation_metric": "rouge_l"}},
            (
                "trainer.validation_metric: without input_features no answers are scored; write one of loss, "
                "bits_per_byte, perplexity"
            ),
        ),
        (
            {"input_features": [{"name": "q"}], "data": CHUNK},
            "data.batching.type: chunk may cut between a prompt and its answer; write pack, or remove input_features",
        ),
        (
            {"data": CHUNK, "preprocessing": {"global_max_sequence_length": 64}},
            (
                "preprocessing.global_max_sequence_length: chunks hold all of a document; remove it, and write "
                "data.batching.context_length"
            ),
        ),
        (
            {"data": {"batching": {"type": "chunk", "isolate_documents": True}, "collate": "mine:Collate"}},
            "data.collate: a custom class does not know the documents of a chunk; remove it, or isolate_documents",
        ),
    ],
)
def test_what_needs_a_prompt_is_refused(sections: dict[str, Any], text: str) -> None:
    assert text in problems_of(FILE | sections)
