"""Tests of generation_config.json: a checkpoint's settings apply unless the configuration overrides them."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationRequest, SlotRequest
from partita.lm.batch_generation.generation import generation_options, log_checkpoint_settings
from partita.lm.decoding.generation_defaults import (
    NEUTRAL,
    SAME_ANSWERS,
    TYPES,
    effective_generation,
    explain_generation,
    read_checkpoint,
)
from partita_schema.errors import ModelError
from partita_schema.sections.prompt import Generation
from partita_trainers.checkpoints.file_sums import FILE as SUMS

SIZES = ((3, 20), (17, 12), (9, 6), (1, 7))
COMMON = 65
"""A token to which the models of these tests give a high probability."""


@pytest.fixture
def checkpoint(small: Any, base_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that creates a model folder with given settings in its generation_config.json."""

    def make(**settings: Any) -> Path:
        lm = small.load(small.config(base_model=str(base_folder)))
        small.sharpen(lm.module)
        folder = tmp_path / "checkpoint"
        lm.save(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0} | settings))
        (folder / SUMS).unlink()
        return folder

    return make


def load(small: Any, folder: Path, **generation: Any) -> tuple[Any, Any]:
    """Return the model, and the options of the configuration merged with those of its checkpoint."""
    config = small.config(base_model=str(folder), generation=generation, trainer={"type": "none"})
    lm = small.load(config, trainable=False)
    return lm, generation_options(config, tokenizer=lm.tokenizer, checkpoint=lm.checkpoint_generation)


def by_library(folder: Path, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Return the answers of transformers' `generate` to each row alone, with the unchanged checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for request in requests:
        prompt = torch.tensor([list(request.input_ids)])
        new = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens)
        ids = new[0, prompt.shape[1] :].tolist()
        found.append(tuple(ids[: ids.index(1)] if 1 in ids else ids))
    return found


SHIPPED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"suppress_tokens": list(range(60, 120))},
    {"bad_words_ids": [[token] for token in range(100, 200)]},
    {"forced_eos_token_id": 1},
    {"no_repeat_ngram_size": 2, "begin_suppress_tokens": [COMMON], "min_new_tokens": 4},
    {"sequence_bias": [[[COMMON], 9.0]], "min_length": 8, "encoder_repetition_penalty": 1.2},
    {"num_beams": 3, "length_penalty": 0.4, "early_stopping": True, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SHIPPED, ids=lambda settings: "-".join(settings))
def test_greedy_answers_equal_those_of_generate_with_the_unchanged_checkpoint(
    small: Any, checkpoint: Any, settings: dict[str, Any]
) -> None:
    folder = checkpoint(**settings)
    requests = small.slot_requests(*SIZES)
    wanted = by_library(folder, requests)
    lm, options = load(small, folder)
    assert [answer.ids for answer in lm.generate(requests, options, seed=0)] == wanted, "in a padded batch"
    if options.beams == 1:
        found = small.answer_in_slots(lm, requests, slots=3, options=options)
        assert [found[request.row].generated.ids for request in requests] == wanted
    lm, plain = load(small, folder, defaults="none")
    assert plain.arguments == {"do_sample": False, "num_beams": 1}
    assert [answer.ids for answer in lm.generate(requests, plain, seed=0)] != wanted


def test_a_checkpoint_that_samples_uses_its_sampling_settings(small: Any, checkpoint: Any) -> None:
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.1}
    lm, options = load(small, checkpoint(**settings))
    assert options.arguments == settings | {"num_beams": 1}
    prompt = small.slot_requests((9, 1))[0].input_ids
    count = 3000
    requests = [SlotRequest(prompt, 1, row, key=row.to_bytes(8, "little")) for row in range(count)]
    drawn = Counter(answer.ids for answer in lm.generate(requests, options, seed=0))
    inputs = torch.tensor([list(prompt)])
    settings = lm.original_generation_config.to_diff_dict() | {"output_scores": True, "return_dict_in_generate": True}
    found = lm.base.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=1, **settings)
    chances = found.scores[0].softmax(-1)[0]
    tokens = torch.arange(len(chances))[chances > 0].tolist()
    assert 1 < len(tokens) <= 4
    for token in tokens:
        ids = () if token == 1 else (token,)
        assert drawn[ids] / count == pytest.approx(float(chances[token]), abs=0.04)


def test_the_configuration_overrides_the_checkpoint_key_by_key(small: Any, checkpoint: Any) -> None:
    folder = checkpoint(do_sample=True, temperature=0.6, top_p=0.8, repetition_penalty=1.3, bad_words_ids=[[7]])
    _, kept = load(small, folder)
    shipped = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3, "bad_words_ids": [[7]]}
    assert kept.arguments == {"do_sample": True, "num_beams": 1, "top_k": 50} | shipped
    _, greedy = load(small, folder, do_sample=False, repetition_penalty=1.0, bad_words=[])
    assert greedy.arguments == {"do_sample": False, "num_beams": 1}
    assert load(small, folder, temperature=0)[1].arguments["do_sample"] is False
    _, other = load(small, folder, do_sample=True, temperature=1.5, top_k=3, bad_words=["a"])
    assert other.arguments["temperature"] == 1.5
    assert (other.arguments["top_k"], other.arguments["top_p"]) == (3, 0.8)
    assert other.arguments["bad_words_ids"] != [[7]]


def test_stop_strings_and_token_limits_come_from_the_checkpoint_too() -> None:
    shipped = {"stop_strings": ["\n\n"], "max_new_tokens": 99}
    found = effective_generation(Generation(), shipped)
    assert (found.value("stop"), found.value("max_new_tokens")) == (("\n\n",), 99)
    assert effective_generation(Generation(stop=()), shipped).value("stop") is None
    assert effective_generation(Generation(), {"stop_strings": "x"}).value("stop") == ("x",)


def test_values_without_effect_are_ignored() -> None:
    assert read_checkpoint(NEUTRAL) == ({}, {})
    greedy = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "length_penalty": 2.0}
    found = effective_generation(Generation(), greedy)
    assert {key: setting.value for key, setting in found.settings.items()} == {"do_sample": False, "num_beams": 1}
    assert effective_generation(Generation(), {"do_sample": True, "top_k": -1}).settings.keys() >= {"top_k"}
    assert effective_generation(Generation(), {"do_sample": True, "top_k": -1}).value("top_k") == 0
    assert effective_generation(Generation(), {"do_sample": True, "temperature": 0.0}).value("do_sample") is False


def test_settings_that_cannot_be_applied_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    shipped = {"num_return_sequences": 3, "watermarking_config": {"bias": 2.5}, "chat_format": "chatml", "top_k": 5}
    with caplog.at_level(logging.INFO):
        log_checkpoint_settings(Generation(), shipped | {"use_cache": True, "max_length": 4096, "do_sample": True})
    applied, not_applied = caplog.messages
    assert applied == (
        "answers follow the checkpoint's generation_config.json: do_sample true, top_k 5 (generation: {defaults: none} "
        "ignores it)"
    )
    assert not_applied == (
        "the checkpoint's generation_config.json has settings that are not applied: num_return_sequences 3, "
        'watermarking_config {"bias": 2.5}, chat_format "chatml"'
    )
    assert caplog.records[1].levelno == logging.WARNING
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_checkpoint_settings(Generation(defaults="none"), shipped)
    assert not caplog.messages


def test_every_setting_of_the_library_is_applied_or_known() -> None:
    from transformers import GenerationConfig

    named = {"num_return_sequences", "watermarking_config", "token_healing", "max_time"}
    moved_to_the_hub = {"penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups", "constraints"}
    unsupported = named | moved_to_the_hub | {"force_words_ids"}
    known = set(GenerationConfig().to_dict())
    assert known <= set(TYPES) | SAME_ANSWERS | unsupported
    assert not set(TYPES) & SAME_ANSWERS
    for key in unsupported:
        assert read_checkpoint({key: 7})[1] == {key: 7}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"repetition_penalty": "x"}, r'repetition_penalty: "x" \(Input should be a valid number'),
        ({"suppress_tokens": [-4]}, r"suppress_tokens: \[-4\] \(Input should be greater than or equal to 0\)"),
        ({"num_beams": 0}, r"num_beams: 0 \(Input should be greater than or equal to 1\)"),
        ({"forced_eos_token_id": {}}, r"forced_eos_token_id: \{\} \("),
    ],
)
def test_an_invalid_value_is_reported_with_its_location(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^the checkpoint's generation_config\.json says {expected}.*correct that file, or"
    ):
        effective_generation(Generation(), settings)
    assert effective_generation(Generation(defaults="none"), settings).value("do_sample") is False


def test_beam_search_of_a_checkpoint_has_no_log_probabilities() -> None:
    message = r"generation\.logprobs: the checkpoint's generation_config\.json says num_beams 4.*write num_beams: 1"
    with pytest.raises(ModelError, match=message):
        effective_generation(Generation(logprobs=True), {"num_beams": 4})
    assert effective_generation(Generation(logprobs=True, num_beams=1), {"num_beams": 4}).value("num_beams") == 1


@pytest.mark.parametrize(
    "adapter", [None, {"type": "lora"}, {"type": "lora", "postprocessor": {"merge_adapter_into_base_model": True}}]
)
def test_a_result_keeps_the_settings_of_its_checkpoint(
    small: Any, checkpoint: Any, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    # transformers refuses to save a temperature without do_sample, unless the checkpoint had it.
    folder = checkpoint(temperature=0.6, repetition_penalty=1.5, max_new_tokens=7)
    config = small.config(base_model=str(folder), adapter=adapter)
    lm = small.load(config)
    small.take_steps(lm, steps=1)
    lm.save(tmp_path / "result")
    saved = small.load(config, saved=tmp_path / "result", trainable=False)
    for key in ("temperature", "repetition_penalty", "max_new_tokens"):
        assert saved.checkpoint_generation[key] == lm.checkpoint_generation[key]


def test_another_generation_config_changes_the_fingerprint(small: Any, checkpoint: Any) -> None:
    folder = checkpoint()
    before = load(small, folder)[0].fingerprint
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert load(small, folder)[0].fingerprint != before


def test_values_are_explained_without_loading_the_model(small: Any, checkpoint: Any) -> None:
    folder = checkpoint(do_sample=True, temperature=0.6, max_time=3)
    config = small.config(base_model=str(folder), generation={"repetition_penalty": 1.2})
    assert explain_generation(config, folder=Path()).lines() == [
        f"checkpoint: {folder / 'generation_config.json'}",
        "do_sample: true          checkpoint",
        "num_beams: 1             default",
        "temperature: 0.6         checkpoint",
        "top_k: 50                checkpoint",
        "repetition_penalty: 1.2  file",
        "not applied: max_time: 3",
    ]
    away = small.config(base_model="nobody/nothing-of-this-name")
    assert explain_generation(away, folder=Path()).checkpoint == (
        "nobody/nothing-of-this-name is not downloaded: what its generation_config.json says is not known before it is"
    )
    (folder / "generation_config.json").write_text("[")
    assert (
        "generation_config.json cannot be read: Expecting value" in explain_generation(config, folder=Path()).checkpoint
    )


def test_settings_in_config_json_apply_without_a_generation_config(small: Any, checkpoint: Any) -> None:
    folder = checkpoint()
    (folder / "generation_config.json").unlink()
    written = json.loads((folder / "config.json").read_text()) | {"repetition_penalty": 1.7}
    (folder / "config.json").write_text(json.dumps(written))
    _, options = load(small, folder)
    assert options.arguments["repetition_penalty"] == 1.7
    config = small.config(base_model=str(folder))
    assert explain_generation(config, folder=Path()).effective.of_checkpoint() == {"repetition_penalty": 1.7}
