"""Tests of rows of a paged cache: where they end, what they share, and what is left of them."""

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.paged.blocks import RESERVED
from partita_schema.errors import ModelError

from ....properties import examples

GREEDY = GenerationOptions({"do_sample": False}, kv_cache="paged")
SAMPLED = GenerationOptions({"do_sample": True, "temperature": 1.5, "top_k": 20}, kv_cache="paged")
PREFIX = tuple(range(11, 31))
"""More tokens than a block has, and no multiple of it."""
SIZES = ((20, 6), (3, 9), (33, 2), (1, 12), (9, 1), (16, 20), (40, 7))
CONTEXT = 64


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config())
    small.sharpen(lm.module)
    return lm


def texts(answers: dict[int, SlotAnswer]) -> dict[int, Any]:
    """Return tokens, text and reason of each row; check that none is an error."""
    assert all(answer.error is None for answer in answers.values())
    return {row: answer.generated for row, answer in answers.items()}


def open_paged(lm: Any, slots: int, *, options: GenerationOptions = GREEDY, prefix: tuple[int, ...] = ()) -> Any:
    assert lm.why_no_slots(options, tokens=CONTEXT) is None
    return lm.open_slots(options, slots=slots, tokens=CONTEXT, prefix=prefix, seed=0)


def run(opened: Any) -> dict[int, SlotAnswer]:
    """Return the answers of all active rows."""
    found = {}
    with opened.lm.evaluating():
        while opened.live:
            found |= {answer.request.row: answer for answer in opened.step()}
    return found


def assert_nothing_is_left(opened: Any) -> None:
    """Check that every block is free, but those of the prefix and of kept rows."""
    assert not opened.leaving
    pool, held = opened.blocks.pool, {*opened.blocks.prefix.blocks}
    for kept in opened.blocks.kept.values():
        held |= {*kept.blocks}
    assert set(pool.users) == held
    assert len(pool.free) == pool.total - RESERVED - len(held)
    assert not opened.state.advances.any()


@contextmanager
def tokens_prefilled(lm: Any) -> Iterator[list[int]]:
    """Record the number of tokens of each forward pass."""
    counts: list[int] = []
    hook = lm.base.get_input_embeddings().register_forward_hook(lambda *given: counts.append(given[1][0].numel()))
    try:
        yield counts
    finally:
        hook.remove()


# Choice of tokens

ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "min_new_tokens": 5, "suppress_tokens": [1, 40, 41]},
    {"begin_suppress_tokens": list(range(2, 130)), "min_length": 22},
    {"do_sample": True, "temperature": 1.5, "repetition_penalty": 1.3, "top_p": 0.9},
    {"do_sample": True, "temperature": 2.0, "top_k": 30, "min_new_tokens": 4},
    {"do_sample": True, "typical_p": 0.8},
    {"do_sample": True, "min_p": 0.05, "epsilon_cutoff": 0.001},
)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: ", ".join(arguments))
@pytest.mark.parametrize("prefix", [(), PREFIX])
def test_tokens_are_chosen_as_in_slots(small: Any, llama: Any, arguments: dict[str, Any], prefix: Any) -> None:
    options = GenerationOptions(arguments, kv_cache="slots")
    requests = small.slot_requests(*SIZES, prefix=prefix[: CONTEXT - 60])
    wanted = texts(small.answer_in_slots(llama, requests, slots=3, options=options))
    paged = replace(options, kv_cache="paged")
    assert texts(small.answer_in_slots(llama, requests, slots=3, options=paged)) == wanted
    plain = texts(small.answer_in_slots(llama, requests, slots=3, options=GenerationOptions({})))
    assert wanted != plain, "the settings have an effect"


REFUSED = (
    ({"no_repeat_ngram_size": 2}, {}, "generation.no_repeat_ngram_size is computed on the host"),
    ({"bad_words_ids": [[5]]}, {}, "generation.bad_words is computed on the host"),
    ({"do_sample": True, "eta_cutoff": 0.1}, {}, "generation.eta_cutoff is computed on the host"),
    ({}, {"logprobs": True}, "generation.logprobs is computed on the host"),
    ({}, {"grammar": 'start: "a"'}, "decoder.constrain chooses tokens on the host"),
    ({"num_beams": 2}, {}, "beam search"),
    ({}, {"slots": False}, "generation.slots is false"),
)


@pytest.mark.parametrize(("arguments", "more", "reason"), REFUSED)
def test_options_that_need_the_host_are_refused_or_use_slots(
    llama: Any, arguments: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    options = GenerationOptions(arguments, kv_cache="paged", **more)
    with pytest.raises(ModelError) as caught:
        llama.why_no_slots(options, tokens=8)
    wanted = f"generation.kv_cache: paged is not available here: {reason}; write kv_cache: auto"
    assert str(caught.value) == wanted
    assert not llama.uses_paged_cache(replace(options, kv_cache="auto")), "a CPU uses slots"


# Where a row ends


@pytest.fixture(scope="module")
def writer(small: Any) -> Any:
    """Return a model that writes letters, and the settings for it."""
    lm = small.load(small.config(architecture="gpt_neox"))
    small.sharpen(lm.module)
    letters = set(lm.tokenizer.encode("abcdefghijklmnop"))
    unwanted = [token for token in range(len(lm.tokenizer)) if token not in letters]
    return lm, {"do_sample": False, "suppress_tokens": unwanted}


def test_stop_texts_and_stop_tokens_end_rows_as_in_single_rows(small: Any, writer: Any) -> None:
    lm, arguments = writer
    requests = small.slot_requests(*((1 + row * 3, 24) for row in range(8)))
    plain = [lm.generate([request], GenerationOptions(arguments), seed=0)[0] for request in requests]
    stops = (plain[0].text[3:5], plain[1].text[5:8], "never")
    for more in ({"stop": stops}, {"stop_token_ids": (plain[0].ids[2], plain[3].ids[6])}):
        options = GenerationOptions(arguments, kv_cache="paged", **more)
        wanted = {request.row: lm.generate([request], options, seed=0)[0] for request in requests}
        assert "stop" in {answer.finish_reason for answer in wanted.values()}
        assert texts(small.answer_in_slots(lm, requests, slots=3, options=options)) == wanted


def test_a_row_decodes_one_token_after_its_end_and_none_after_its_limit(small: Any, writer: Any) -> None:
    lm, arguments = writer
    [request] = small.slot_requests((5, 24))
    plain = lm.generate([request], GenerationOptions(arguments), seed=0)[0]
    for end in (plain.ids[4], None):
        stop = () if end is None else (end,)
        opened = open_paged(lm, 4, options=GenerationOptions(arguments, stop_token_ids=stop, kv_cache="paged"))
        with lm.evaluating(), tokens_prefilled(lm) as passes:
            opened.admit([request])
            [answer] = run(opened).values()
        new = len(answer.generated.ids) + len(stop)
        assert len(passes) == new + len(stop), "a prefill gives the first token"
        assert_nothing_is_left(opened)


@given(data=st.data())
@examples(20)
def test_any_lengths_limits_rows_and_order_give_the_same_answers(small: Any, llama: Any, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14)), min_size=1, max_size=9))
    prefix = PREFIX[: data.draw(st.integers(0, 20))]
    plan = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    requests = small.slot_requests(*sizes, prefix=prefix)
    slots = data.draw(st.integers(1, 10))
    found = small.answer_in_slots(llama, requests, slots=slots, prefix=prefix, plan=plan, options=GREEDY)
    assert {row: answer.ids for row, answer in texts(found).items()} == {
        request.row: small.greedy_alone(llama, request) for request in requests
    }


# What rows share


def test_the_shared_prefix_is_computed_once_and_its_full_blocks_are_shared(small: Any, llama: Any) -> None:
    requests = small.slot_requests((5, 3), (9, 3), (2, 3), prefix=PREFIX)
    with tokens_prefilled(llama) as passes:
        opened = open_paged(llama, 4, prefix=PREFIX)
        with llama.evaluating():
            opened.admit(requests)
    assert passes == [len(PREFIX), 5 + 9 + 2]
    first = {row.blocks[0] for row in opened.live}
    assert first == {opened.blocks.prefix.blocks[0]}
    assert opened.blocks.pool.users[first.pop()] == 4
    assert len({row.blocks[1] for row in opened.live} - {opened.blocks.prefix.blocks[1]}) == 3, "rows write to it"
    wanted = {request.row: small.greedy_alone(llama, request) for request in requests}
    assert {row: answer.ids for row, answer in texts(run(opened)).items()} == wanted
    assert_nothing_is_left(opened)


@pytest.mark.parametrize("prefix", [(), PREFIX])
@pytest.mark.parametrize(("slots", "plan"), [(16, (16,)), (5, (1, 3, 0, 2, 0, 0)), (2, (2, 0))])
def test_samples_of_a_prompt_have_the_tokens_of_prompts_computed_by_themselves(
    small: Any, llama: Any, prefix: Any, slots: int, plan: tuple[int, ...]
) -> None:
    requests = small.slot_requests((20, 6), (3, 9), (16, 2), (1, 12), prefix=prefix)
    samples = [
        replace(request, row=request.row * 4 + number, key=request.key + b"%d" % number, shared=request.row)
        for request in requests
        for number in range(4)
    ]
    apart = [replace(sample, shared=None) for sample in samples]
    wanted = texts(
        small.answer_in_slots(
            llama, apart, slots=1, options=replace(SAMPLED, kv_cache="slots"), prefix=prefix, plan=(1,)
        )
    )
    found = small.answer_in_slots(llama, samples, slots=slots, options=SAMPLED, prefix=prefix, plan=plan)
    assert texts(found) == wanted


def test_a_forked_prompt_is_computed_once_and_shares_its_full_blocks(small: Any, llama: Any) -> None:
    [prompt] = small.slot_requests((37, 8))
    samples = [replace(prompt, row=row, key=b"%d" % row, shared=0) for row in range(6)]
    opened = open_paged(llama, 8, options=SAMPLED)
    with llama.evaluating(), tokens_prefilled(llama) as passes:
        opened.admit(samples[:2])
        opened.step()
        opened.admit(samples[2:])
    assert passes == [37, 4]
    assert len({tuple(row.blocks[:2]) for row in opened.live}) == 1
    assert len({row.blocks[2] for row in opened.live}) == 6
    run(opened)
    assert_nothing_is_left(opened)


def test_rows_that_continue_compute_only_what_is_new(small: Any, llama: Any) -> None:
    rng = random.Random(0)
    for slots in (1, 2, 4):
        opened = open_paged(llama, slots, prefix=PREFIX)
        said: dict[int, list[int]] = {row: list(PREFIX) for row in range(4)}
        for turn in range(3):
            requests = [
                SlotRequest([*said[row], *(rng.randrange(2, 250) for _ in range(4))], 5, row, keep=True) for row in said
            ]
            uncached = {request.row: opened.uncached_tokens(request) for request in requests}
            waiting = list(requests)
            with llama.evaluating(), tokens_prefilled(llama) as passes:
                while waiting or opened.live:
                    while waiting and len(opened.live) < slots:
                        opened.admit([waiting.pop(0)])
                    for answer in opened.step():
                        request = answer.request
                        assert answer.generated.ids == small.greedy_alone(llama, request), (slots, turn)
                        said[request.row] = [*request.input_ids, *answer.generated.ids]
            if slots == 4:
                assert set(uncached.values()) == {4 if not turn else 5}, "the last token of an answer is not cached"
                assert passes[:4] == list(uncached.values())
            assert_nothing_is_left(opened)
        for row in said:
            opened.forget(row)
        assert not opened.blocks.kept
        assert_nothing_is_left(opened)


def test_requests_that_begin_like_another_row_compute_only_the_rest(small: Any, llama: Any) -> None:
    [first] = small.slot_requests((40, 6))
    others = [
        SlotRequest([*first.input_ids[:33], 50 + row, 60], 6, row, keep=True, prefix_group=0) for row in range(1, 4)
    ]
    opened = open_paged(llama, 3)
    with llama.evaluating(), tokens_prefilled(llama) as passes:
        opened.admit([replace(first, keep=True, prefix_group=0)])
        assert opened.uncached_tokens(others[0]) == 2
        opened.admit(others[:2])
        found = run(opened)
        opened.admit(others[2:])
        found |= run(opened)
    assert passes[:2] == [40, 4]
    assert 2 in passes[2:]
    wanted = {request.row: small.greedy_alone(llama, request) for request in (first, *others)}
    assert {row: answer.ids for row, answer in texts(found).items()} == wanted
    assert_nothing_is_left(opened)


# What is left


def test_cancelled_rows_free_their_blocks_and_change_no_other(small: Any, llama: Any) -> None:
    requests = small.slot_requests((20, 9), (3, 9), (11, 9), (5, 9))
    opened = open_paged(llama, 4)
    with llama.evaluating():
        opened.admit(requests)
        opened.step()
        opened.cancel([0, 2, 77])
    found = run(opened)
    assert {row: answer.ids for row, answer in texts(found).items()} == {
        request.row: small.greedy_alone(llama, request) for request in (requests[1], requests[3])
    }
    assert_nothing_is_left(opened)


def test_a_prompt_of_nan_breaks_the_requests_that_share_it_and_leaves_clean_blocks(small: Any, llama: Any) -> None:
    prompt, other = small.slot_requests((30, 4), (5, 8))
    embedding = llama.base.get_input_embeddings().weight
    token = prompt.input_ids[-1]
    before = embedding.data[token].clone()
    opened = open_paged(llama, 4)
    with llama.evaluating(), torch.no_grad():
        opened.admit([replace(other, row=9)])
        embedding[token] = torch.nan
        try:
            opened.admit([replace(prompt, row=row, shared=0) for row in range(3)])
        finally:
            embedding[token] = before
        found = run(opened)
    assert [found[row].error for row in range(3)] == ["the model's scores are NaN"] * 3
    assert found[9].generated.ids == small.greedy_alone(llama, other)
    assert all(bool(held.isfinite().all()) for held in opened.cache.held)
    assert_nothing_is_left(opened)


def test_a_token_after_the_end_that_gives_nan_breaks_no_other_row(small: Any, llama: Any) -> None:
    *firsts, second = small.slot_requests(*[(5, 20)] * 20, (25, 6))
    wanted = small.greedy_alone(llama, second)
    first, end = next(
        (request, ids[3])
        for request, ids in ((request, small.greedy_alone(llama, request)) for request in firsts)
        if ids[3] not in (*ids[:3], *request.input_ids, *wanted)
    )
    options = GenerationOptions({"do_sample": False}, stop_token_ids=(end,), kv_cache="paged")
    opened = open_paged(llama, 1, options=options)

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((inputs[0] == end)[..., None], torch.nan)

    hook = llama.base.get_input_embeddings().register_forward_hook(spoil)
    with llama.evaluating():
        opened.admit([first])
        found = run(opened)
        hook.remove()
        assert all(bool(held.isfinite().all()) for held in opened.cache.held)
        opened.admit([second])
        found |= run(opened)
    assert texts(found)[first.row].ids == small.greedy_alone(llama, first)[:3]
    assert texts(found)[second.row].ids == wanted
    assert_nothing_is_left(opened)


def test_a_row_starts_before_the_last_token_of_another_was_read_only_if_there_are_blocks(
    small: Any, llama: Any
) -> None:
    requests = small.slot_requests((40, 24), (40, 24), (40, 24))
    end = small.greedy_alone(llama, requests[0])[2]
    options = GenerationOptions({"do_sample": False}, stop_token_ids=(end,), kv_cache="paged")
    wanted = {request.row: cut(small.greedy_alone(llama, request), end) for request in requests}
    opened = open_paged(llama, 2, options=options)
    found = {}
    with llama.evaluating():
        opened.admit(requests[:2])
        while not found:
            found |= {answer.request.row: answer for answer in opened.step()}
        assert len(opened.leaving) == 1
        assert not opened.blocks.pool.free
        opened.admit(requests[2:])
        assert not opened.leaving
    found |= run(opened)
    assert {row: answer.ids for row, answer in texts(found).items()} == wanted


def cut(ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    """Return the tokens before an end token."""
    return ids[: ids.index(end)] if end in ids else ids


def test_slots_that_are_no_longer_used_take_no_memory(small: Any, llama: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        opened = open_paged(llama, 4)
        with llama.evaluating():
            opened.admit(small.slot_requests((5, 3), (9, 3)))
            run(opened)
        opened.close()
        held = weakref.ref(opened.cache)
        del opened
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["embedding", "output", "choice"])
def test_a_failed_pass_leaves_nothing_and_live_rows_continue(small: Any, llama: Any, where: str) -> None:
    requests = small.slot_requests((3, 9), (8, 9), (5, 9), (4, 9), prefix=PREFIX)
    opened = open_paged(llama, 4, prefix=PREFIX)
    base = llama.base
    broken = {"embedding": base.get_input_embeddings(), "output": base.get_output_embeddings()}.get(where)

    def fail(*given: Any, **more: Any) -> None:
        raise RuntimeError("no")

    with llama.evaluating():
        opened.admit(requests[:2])
        for call in (partial(opened.admit, requests[2:]), opened.step):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*((type(opened.choice), "__call__") if broken is None else (broken, "forward")), fail)
                with pytest.raises(RuntimeError):
                    call()
            assert base.config._attn_implementation == "sdpa"
            assert llama.positions.indices_K is None
        found = {answer.request.row: answer for answer in opened.step()}
        opened.admit(requests[2:])
    found |= run(opened)
    assert {row: answer.ids for row, answer in texts(found).items()} == {
        request.row: small.greedy_alone(llama, request) for request in requests
    }
    assert_nothing_is_left(opened)


def test_the_model_can_be_used_for_other_work_while_rows_are_active(small: Any, llama: Any) -> None:
    requests = small.slot_requests((9, 8), (4, 12))
    wanted = {request.row: small.greedy_alone(llama, request) for request in requests}
    opened = open_paged(llama, 4)
    found = {}
    with llama.evaluating():
        opened.admit(requests)
        while opened.live:
            assert small.greedy_alone(llama, requests[0]) == wanted[0]
            found |= {answer.request.row: answer for answer in opened.step()}
    assert {row: answer.ids for row, answer in texts(found).items()} == wanted


def test_a_row_with_an_answer_that_was_not_returned_is_active(small: Any, llama: Any) -> None:
    first, second = small.slot_requests((40, 20), (20, 4))
    end = small.greedy_alone(llama, first)[2]
    options = GenerationOptions({"do_sample": False}, stop_token_ids=(end,), kv_cache="paged")
    opened = open_paged(llama, 2, options=options)
    found: list[SlotAnswer] = []
    with llama.evaluating():
        opened.admit([replace(first, keep=True), second])
        while not found:
            found += opened.step()
        assert [answer.request.row for answer in found] == [0]
        opened.uncached_tokens(replace(first, keep=True))
        assert [row.request.row for row in opened.live] == [1], "if memory ran out now, it would have to start again"
        assert not opened.active
        assert [answer.request.row for answer in opened.admit([replace(second, row=2)])] == [1]
        assert [row.request.row for row in opened.live] == [2]
