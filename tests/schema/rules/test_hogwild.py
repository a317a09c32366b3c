"""Tests of settings that a bag of words and Hogwild training do not support: reported with key and advice."""

from typing import Any

import pytest

from partita_schema.load import load_config
from partita_schema.sections.model import EmbeddingBagModel
from partita_schema.sections.trainer import HogwildTrainer

from ..refusals import last_line_of

FILE: dict[str, Any] = {
    "base_model": {"type": "embedding_bag"},
    "input_features": [{"name": "title"}, {"name": "text"}],
    "output_features": [{"name": "topic", "type": "category"}],
    "trainer": {"type": "hogwild"},
}


def problem_text(**sections: Any) -> str:
    return last_line_of(FILE | sections)


def output(**keys: Any) -> list[dict[str, Any]]:
    return [FILE["output_features"][0] | keys]


def trainer(**keys: Any) -> dict[str, Any]:
    return FILE["trainer"] | keys


def test_a_bag_of_words_needs_two_types() -> None:
    config = load_config(FILE).config

    assert config.base_model == EmbeddingBagModel(type="embedding_bag")
    assert config.trainer == HogwildTrainer(type="hogwild")
    assert (config.trainer.workers, config.trainer.batch_size, config.trainer.eval_batch_size) == (2, 16, 1024)


@pytest.mark.parametrize(
    "sections",
    [
        {"model_parameters": {"device": "cpu"}},
        {"prompt": {"template": "{title} {text}"}},
        {"generation": {"logprobs": True}},
        {"output_features": output(decoder={"scoring": True, "labels": ["one", "two"]})},
        {"trainer": trainer(workers=1, optimizer={"type": "sgd"}, learning_rate=0.5, epochs=2)},
        {"data": {"source": "rows.csv", "encode": "cache", "loader": {"workers": 2}}},
    ],
    ids=str,
)
def test_every_supported_setting_of_a_bag_of_words_is_accepted(sections: dict[str, Any]) -> None:
    load_config(FILE | sections)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"base_model": "some/llama"},
            (
                "base_model: hogwild trains sparse models only, and a language model learns badly without locks; "
                "write {type: embedding_bag}, or trainer: {type: finetune}"
            ),
        ),
        (
            {"trainer": {"type": "finetune"}},
            (
                "trainer.type: a bag of words is trained by hogwild, not by finetune; write type: hogwild, with "
                "workers: 1 for a single process"
            ),
        ),
        (
            {"model_parameters": {"device": "cuda:1"}},
            (
                "model_parameters.device: hogwild needs memory that processes share, which cuda:1 has not; write cpu, "
                "or remove it"
            ),
        ),
        ({"model_parameters": {"dtype": "bfloat16"}}, "model_parameters.dtype: a bag of words has no dtype; remove it"),
        (
            {"adapter": {"type": "lora"}},
            "adapter: a bag of words is small and trained whole; remove adapter",
        ),
        (
            {"quantization": {"bits": 4}, "adapter": {"type": "lora"}},
            "quantization: a bag of words is small and trained whole; remove quantization",
        ),
        ({"trust_remote_code": True}, "trust_remote_code: a bag of words comes without code; remove it"),
        (
            {"output_features": [{"name": "note", "type": "text"}]},
            (
                "output_features[0].type: a bag of words chooses a label, and this is a text; write type: category, or "
                "a language model as base_model"
            ),
        ),
        (
            {"output_features": [*output(), {"name": "other", "type": "category"}]},
            "output_features[1]: a bag of words has one output; remove the others, or write a file for each",
        ),
        (
            {"input_features": [{"name": "messages", "type": "dialogue"}]},
            "input_features[0].type: a bag holds the words of texts; write type: text",
        ),
        (
            {"output_features": output(decoder={"fallback_label": "one"})},
            (
                "output_features[0].decoder.fallback_label: fallback_label reads generated answers, and a bag of words "
                "chooses a label; remove it"
            ),
        ),
        (
            {"prompt": {"task": "Which topic?"}},
            "prompt.task: what all rows have in common tells a bag of words nothing; remove task",
        ),
        (
            {"generation": {"max_new_tokens": 5}},
            "generation.max_new_tokens: a label is chosen and nothing is generated; remove max_new_tokens",
        ),
        (
            {"preprocessing": {"global_max_sequence_length": 9}},
            (
                "preprocessing.global_max_sequence_length: a bag of words has no length limit; remove it, or write "
                "preprocessing.max_sequence_length in an input"
            ),
        ),
        (
            {"data": {"source": {"type": "csv", "path": "rows.csv", "streaming": True}}},
            "data.source.streaming: the workers share all rows in memory; remove streaming",
        ),
        (
            {"data": {"batching": {"type": "bucket"}}},
            "data.batching: batching has no effect on hogwild, whose workers take rows by chance; remove it",
        ),
        (
            {"backend": {"type": "torchrun"}},
            (
                "backend.type: the workers of hogwild share the memory of one machine and are started by the trainer; "
                "remove backend, and write trainer.workers"
            ),
        ),
        (
            {"backend": {"type": "ray"}},
            (
                "backend.type: the workers of hogwild share the memory of one machine and are started by the trainer; "
                "remove backend, and write trainer.workers"
            ),
        ),
        (
            {"trainer": trainer(gradient_clipping={"clipglobalnorm": 1.0})},
            (
                "trainer.gradient_clipping: the norm of all gradients would need every worker to wait; remove it, or "
                "write a lower learning_rate"
            ),
        ),
        (
            {"trainer": trainer(deterministic=True)},
            (
                "trainer.deterministic: workers write over each other, and no two runs of several are the same; "
                "remove it, and write workers: 1 for the same weights each time"
            ),
        ),
        (
            {"trainer": trainer(effective_batch_size=64)},
            "trainer.effective_batch_size: each batch of a worker is an update; remove it, and write batch_size",
        ),
        (
            {"trainer": trainer(memory_budget="1GB")},
            "trainer.memory_budget: memory_budget has no effect on hogwild, whose sizes are numbers; remove it",
        ),
        ({"trainer": trainer(batch_size="auto")}, "trainer.batch_size: write an integer of at least 1; got 'auto'"),
        ({"trainer": trainer(workers=0)}, "trainer.workers: write an integer of at least 1; got 0"),
        (
            {"trainer": trainer(optimizer={"type": "adamw"})},
            "trainer.optimizer.type: write adagrad or sgd; got 'adamw'",
        ),
        (
            {"base_model": {"type": "embeding_bag"}},
            "base_model.type: got embeding_bag; did you mean embedding_bag?",
        ),
        (
            {"base_model": {"type": "embedding_bag", "hidden_size": 8}},
            (
                "base_model.hidden_size: hidden_size has no effect with type: embedding_bag; remove it, it belongs to "
                "type: scratch"
            ),
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unsupported_settings_are_refused(sections: dict[str, Any], text: str) -> None:
    assert problem_text(**sections) == text
