"""Tests of decoding with a paged KV cache: answers equal those of transformers and of slots."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.paged.check import why_unsupported_options

from ....properties import ends
from ..foreign_models import FOREIGN, WINDOWED

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1}, kv_cache="paged")
SAMPLED = GenerationOptions({"do_sample": True, "temperature": 2.0, "num_beams": 1}, kv_cache="paged")
SIZES = ((1, 5), (63, 1), (2, 1), (17, 4), (1, 63), (9, 8), (40, 3), (5, 2), (30, 2))
"""Prompt tokens and maximum new tokens: prompts from 1 token to the context less one, and answers that fill it."""
PREFIX = tuple(range(11, 31))
"""More tokens than a block has, and no multiple of it."""
AFTER_PREFIX = ((1, 5), (43, 1), (2, 1), (17, 4), (9, 8), (27, 17), (5, 2), (20, 2))


def ids(answers: dict[int, SlotAnswer]) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each row's answer; check that none is an error."""
    assert all(answer.error is None for answer in answers.values())
    return {row: answer.generated.ids for row, answer in answers.items() if answer.generated is not None}


def in_slots(small: Any, lm: Any, requests: list[SlotRequest], options: GenerationOptions, **given: Any) -> Any:
    return small.answer_in_slots(lm, requests, slots=len(requests), options=replace(options, kv_cache="slots"), **given)


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config())
    small.sharpen(lm.module)
    return lm


def assert_equal_to_rows_alone(small: Any, lm: Any, *, pools: tuple[int, ...]) -> None:
    """Check answers with and without a shared prefix, with pools of each size."""
    for prefix, sizes in (((), SIZES), (PREFIX, AFTER_PREFIX)):
        requests = small.slot_requests(*sizes, prefix=prefix)
        wanted = {request.row: small.greedy_alone(lm, request) for request in requests}
        for slots in pools:
            requests.reverse()
            found = small.answer_in_slots(lm, requests, slots=slots, prefix=prefix, options=GREEDY)
            assert ids(found) == wanted, (slots, prefix)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_greedy_answers_equal_those_of_transformers_row_by_row(small: Any, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    small.sharpen(lm.module)
    assert_equal_to_rows_alone(small, lm, pools=(1, 3, 64))


@pytest.mark.parametrize("kind", ends(WINDOWED))
def test_rows_longer_than_a_window_give_the_answers_of_transformers(small: Any, foreign: Any, kind: str) -> None:
    lm = foreign(kind, WINDOWED[kind])
    assert lm.why_not_paged is None
    assert_equal_to_rows_alone(small, lm, pools=(3, 64))


REFUSED = ("deepseek_v3", "mpt", "gptj", "gpt_neo", "bloom", "falcon", "bart")
"""Architectures that compute with the keys of a row, or with a mask, outside of transformers' attention functions."""


@pytest.mark.parametrize("kind", ends(FOREIGN))
def test_other_architectures_give_the_same_answers_or_are_refused(small: Any, foreign: Any, kind: str) -> None:
    lm = foreign(kind, FOREIGN[kind])
    if kind in REFUSED:
        assert lm.why_not_paged.startswith(type(lm.base).__name__)
        return
    assert_equal_to_rows_alone(small, lm, pools=(3, 64))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"adapter": {"type": "lora", "r": 4, "init": "gaussian"}}, id="lora"),
        pytest.param({"model_parameters": {"attention": "eager"}}, id="eager"),
        pytest.param({"quantization": {"bits": 8, "llm_int8_threshold": 0}}, marks=pytest.mark.long, id="8 bits"),
    ],
)
def test_adapters_quantized_weights_and_other_attention_give_the_same_answers(
    small: Any, base_folder: Path, sections: dict[str, Any]
) -> None:
    trainable = "adapter" in sections
    trainer = {"type": "finetune" if trainable else "none"}
    lm = small.load(small.config(base_model=str(base_folder), trainer=trainer, **sections), trainable=trainable)
    small.sharpen(lm.module)
    assert lm.why_not_paged is None
    assert_equal_to_rows_alone(small, lm, pools=(3,))


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_8_bit_layers_that_look_for_outliers_are_refused_on_a_gpu(
    small: Any, base_folder: Path, monkeypatch: pytest.MonkeyPatch, threshold: float
) -> None:
    sections = {"quantization": {"bits": 8, "llm_int8_threshold": threshold}, "trainer": {"type": "none"}}
    lm = small.load(small.config(base_model=str(base_folder), **sections), trainable=False)
    options = GenerationOptions({}, kv_cache="paged")
    assert why_unsupported_options(lm, options) is None
    monkeypatch.setattr(lm, "device", torch.device("cuda"))
    reason = "8-bit layers look for outliers on the host in each pass; llm_int8_threshold: 0 turns that off"
    assert why_unsupported_options(lm, options) == (reason if threshold else None)


def test_scores_are_limited_as_by_transformers(foreign: Any) -> None:
    lm = foreign("gemma2", WINDOWED["gemma2"] | {"attn_logit_softcapping": 0.05})
    prompt = torch.arange(3, 20)[None]
    with lm.evaluating(), torch.no_grad():
        limited = lm.base(prompt).logits
        assert lm.why_not_paged is None, "its logits are those of eager attention"
        for layer in lm.base.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert not torch.allclose(lm.base(prompt).logits, limited, rtol=0.01)


def test_bfloat16_is_answered_with_finite_scores(small: Any, base_folder: Path) -> None:
    config = small.config(base_model=str(base_folder), trainer={"type": "none"}, model_parameters={"dtype": "bfloat16"})
    lm = small.load(config, trainable=False)
    requests = small.slot_requests(*SIZES)
    found = small.answer_in_slots(lm, requests, slots=3, options=GREEDY)
    assert set(ids(found)) == {request.row for request in requests}
