"""Tests of slots whose requests have their own settings, share beginnings of prompts, or are cancelled."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from partita.lm.base import GenerationOptions, SlotRequest, common_tokens
from partita.lm.products.product import Implementation

GREEDY = GenerationOptions({"do_sample": False})
SAMPLED = GenerationOptions({"do_sample": True, "temperature": 1.2, "top_k": 30})
REPORTED = GenerationOptions({"do_sample": False}, logprobs=True, top_logprobs=2)
STOPPED = GenerationOptions({"do_sample": False}, stop=("a",), stop_token_ids=(40,))
FORCED = GenerationOptions({"do_sample": False}, grammar="start: /[0-9]{3}/")


@pytest.fixture(scope="module", params=[Implementation.TORCH, Implementation.BY_COLUMN, Implementation.ONEDNN])
def lm(request: pytest.FixtureRequest, small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small.load_sharp(tmp_path_factory.mktemp("slots"), products=request.param)


def prompts(count: int, *, shared: int, seed: int = 1) -> list[list[int]]:
    """Return prompts of which every second one begins with the same tokens."""
    draw = random.Random(seed)
    beginning = [draw.randrange(2, 250) for _ in range(shared)]
    return [
        [*(beginning if index % 2 else ()), *(draw.randrange(2, 250) for _ in range(draw.randrange(1, 20)))]
        for index in range(count)
    ]


def requests(settings: Sequence[GenerationOptions], *, count: int, shared: int = 12) -> list[SlotRequest]:
    return [
        SlotRequest(
            ids, 8, row, key=str(row).encode(), keep=True, prefix_group=0, options=settings[row % len(settings)]
        )
        for row, ids in enumerate(prompts(count, shared=shared))
    ]


@pytest.mark.parametrize("slots", [2, 7])
def test_rows_with_their_own_settings_are_answered_as_alone(small: Any, lm: Any, slots: int) -> None:
    asked = requests([GREEDY, SAMPLED, REPORTED, STOPPED, FORCED], count=15)
    found = small.answer_in_slots(lm, asked, slots=slots, options=GREEDY)
    for request in asked:
        assert request.options is not None
        alone = SlotRequest(request.input_ids, request.max_new_tokens, request.row, key=request.key)
        wanted = small.answer_in_slots(lm, [alone], slots=1, options=request.options)[request.row].generated
        answer = found[request.row].generated
        assert (answer.ids, answer.text, answer.finish_reason) == (wanted.ids, wanted.text, wanted.finish_reason)
        assert (answer.logprob is None) == (not request.options.logprobs)
        if request.options.logprobs:
            assert answer.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert sum(one.logprob for one in answer.token_logprobs) == pytest.approx(answer.logprob, abs=1e-4)


def test_rows_with_equal_settings_are_sampled_together(lm: Any) -> None:
    asked = [
        replace(request, options=GenerationOptions({"do_sample": True, "top_k": 5}))
        for request in requests([GREEDY], count=6)
    ]
    opened = lm.open_slots(GREEDY, slots=6, tokens=60, prefix=(), seed=0)
    with lm.evaluating():
        opened.admit(asked)
    assert len({id(row.settings) for row in opened.live}) == 1
    assert len(opened.settings.kept) == 1
    opened.close()


def test_only_the_tokens_after_a_common_beginning_are_computed(lm: Any) -> None:
    asked = [request for request in requests([GREEDY], count=8, shared=40) if request.row % 2]
    opened = lm.open_slots(GREEDY, slots=8, tokens=80, prefix=(), seed=0)
    with lm.evaluating():
        opened.admit(asked[:1])
        for request in asked[1:]:
            expected = len(request.input_ids) - 40
            assert opened.uncached_tokens(request) == expected
            before = opened.tokens_prefilled
            opened.admit([request])
            assert opened.tokens_prefilled - before <= expected + 8, "oneDNN pads to a few tokens"
    opened.close()


def test_a_group_copies_from_a_finished_row_that_one_of_it_takes_over(small: Any, lm: Any) -> None:
    asked = [request for request in requests([GREEDY], count=8, shared=40) if request.row % 2]
    opened = lm.open_slots(GREEDY, slots=3, tokens=80, prefix=(), seed=0)
    with lm.evaluating():
        opened.admit(asked[:1])
        ended = []
        while opened.live:
            ended += opened.step()
        assert len(opened.kept.rows) == 1
        before = opened.tokens_prefilled
        longest = max(len(request.input_ids) for request in asked[1:]) - 40
        ended += opened.admit(asked[1:])
        assert opened.tokens_prefilled - before <= 3 * (longest + 8)
        while opened.live:
            ended += opened.step()
    opened.close()
    for answer in ended:
        assert answer.generated.ids == small.greedy_alone(lm, answer.request)


def test_cancelled_rows_free_their_slots_and_change_no_other(small: Any, lm: Any) -> None:
    asked = requests([GREEDY], count=6, shared=12)
    opened = lm.open_slots(GREEDY, slots=6, tokens=60, prefix=(), seed=0)
    ended = []
    with lm.evaluating():
        ended += opened.admit(asked)
        opened.cancel({0, 3, 99})
        assert {row.request.row for row in opened.live} == {1, 2, 4, 5}
        ended += opened.admit([asked[0]])
        while opened.live:
            ended += opened.step()
    opened.close()
    assert sorted(answer.request.row for answer in ended) == [0, 1, 2, 4, 5]
    for answer in ended:
        assert answer.generated.ids == small.greedy_alone(lm, answer.request)


def test_common_tokens() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one = [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        other = [draw.randrange(3) for _ in range(draw.randrange(12))]
        expected = 0
        while expected < min(len(one) - 1, len(other)) and one[expected] == other[expected]:
            expected += 1
        assert common_tokens(one, other) == expected
