"""Tests of prompts that several requests share: computed once, with the tokens of requests computed by themselves."""

from dataclasses import replace
from typing import Any

import pytest

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest

SAMPLED = GenerationOptions({"do_sample": True, "temperature": 1.5, "top_k": 20})
GREEDY = GenerationOptions({"do_sample": False})
PREFIX = (11, 12, 13, 14, 15, 16, 17, 18, 19)
SIZES = ((20, 6), (3, 9), (11, 2), (1, 12))
"""Prompt tokens and maximum new tokens of the prompts."""
SAMPLES = 4


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config(architecture="llama"))
    small.sharpen(lm.module)
    return lm


def samples_of(requests: list[SlotRequest], *, shared: bool = True) -> list[SlotRequest]:
    """Return several requests per prompt, with their own keys."""
    return [
        replace(
            request,
            row=request.row * SAMPLES + number,
            key=request.key + b"%d" % number,
            shared=request.row if shared else None,
        )
        for request in requests
        for number in range(SAMPLES)
    ]


def texts(answers: dict[int, SlotAnswer]) -> dict[int, tuple[int, ...]]:
    return {row: answer.generated.ids for row, answer in answers.items() if answer.generated is not None}


@pytest.mark.parametrize("prefix", [(), PREFIX])
@pytest.mark.parametrize("options", [SAMPLED, GREEDY, replace(SAMPLED, logprobs=True)])
@pytest.mark.parametrize(("slots", "plan"), [(16, (16,)), (5, (1, 3, 0, 2, 0, 0)), (2, (2, 0))])
def test_forked_prompts_have_the_tokens_of_prompts_computed_by_themselves(
    small, llama: Any, prefix: tuple[int, ...], options: GenerationOptions, slots: int, plan: tuple[int, ...]
) -> None:
    requests = small.slot_requests(*SIZES, prefix=prefix)
    alone = small.answer_in_slots(
        llama, samples_of(requests, shared=False), slots=1, options=options, prefix=prefix, plan=(1,)
    )
    forked = small.answer_in_slots(llama, samples_of(requests), slots=slots, options=options, prefix=prefix, plan=plan)
    assert texts(forked) == texts(alone)
    if options.do_sample:
        assert len({texts(forked)[row] for row in range(SAMPLES)}) > 1, "the samples of a prompt differ"


def test_a_shared_prompt_is_computed_once_while_one_of_its_requests_is_active(small, llama: Any) -> None:
    prompt, other = small.slot_requests((30, 8), (10, 8))
    samples = [replace(prompt, row=row, key=b"%d" % row, shared=0) for row in range(6)]
    slots = llama.open_slots(SAMPLED, slots=8, tokens=40, prefix=(), seed=0)
    with llama.evaluating():
        slots.admit([samples[0], replace(other, row=6, shared=1), samples[1]])
        assert slots.tokens_prefilled == 2 * 30, "both prompts in one pass, padded to the longer one"
        slots.admit(samples[2:4])
        slots.step()
        slots.admit(samples[4:])
        assert slots.tokens_prefilled == 2 * 30 + len(slots.live) - 2
    slots.close()


def test_a_shared_prompt_is_computed_again_once_all_of_its_requests_have_ended(small, llama: Any) -> None:
    [prompt] = small.slot_requests((30, 1))
    slots = llama.open_slots(SAMPLED, slots=8, tokens=40, prefix=(), seed=0)
    with llama.evaluating():
        [first] = slots.admit([replace(prompt, shared=0)])
        [second] = slots.admit([replace(prompt, row=1, shared=0)])
    assert slots.tokens_prefilled == 2 * 30
    assert first.generated == second.generated
    slots.close()


def test_a_prompt_of_nan_breaks_every_request_that_shares_it(small, llama: Any) -> None:
    import torch

    [prompt] = small.slot_requests((30, 4))
    embedding = llama.base.get_input_embeddings().weight
    token = prompt.input_ids[-1]
    before = embedding.data[token].clone()
    slots = llama.open_slots(SAMPLED, slots=4, tokens=40, prefix=(), seed=0)
    with llama.evaluating(), torch.no_grad():
        embedding[token] = torch.nan
        try:
            answers = slots.admit([replace(prompt, row=row, shared=0) for row in range(3)])
        finally:
            embedding[token] = before
        assert [answer.error for answer in answers] == ["the model's scores are NaN"] * 3
        assert all(bool(held.isfinite().all()) for held in slots.pool.held), "the slots are clean for other rows"
    slots.close()
