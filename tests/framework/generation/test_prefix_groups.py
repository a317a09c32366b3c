"""Tests of prompts that begin alike: the beginning is computed once, and every row has the answer that it has alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.requests import RowRequests, plan
from partita.lm.slots.slots import Slots

from ...properties import examples
from ..lm.conftest import sharpen
from .conftest import nano_model
from .test_scheduler import GREEDY, NEW, PREFIX, SAMPLED, Prompts, answers, one_by_one, rows_of

BEGINNING = 30
SIZES = (5, 1, 4, 2, 1, 6)
"""Rows of each prefix group; a single row belongs to none."""
PAGED = replace(GREEDY, kv_cache="paged")


@pytest.fixture(scope="module")
def lm() -> Any:
    lm = nano_model()
    sharpen(lm.module)
    for options in (GREEDY, PAGED):
        lm.why_no_slots(options, tokens=8)  # the checks of both caches run once, before passes fail
    return lm


def grouped_prompts(sizes: tuple[int, ...] = SIZES, *, prefix: list[int] | None = None) -> Prompts:
    """Return prompts that begin with the 30 tokens of their prefix group, then have 3 to 9 of their own; shuffled."""
    draw = random.Random(3)
    ids, prefix_groups = [], []
    for number, size in enumerate(sizes):
        beginning = [*(prefix or []), *(draw.randrange(50, 250) for _ in range(BEGINNING))]
        for _ in range(size):
            ids.append([*beginning, *(draw.randrange(50, 250) for _ in range(draw.randint(3, 9)))])
            prefix_groups.append(number if size > 1 else -1)
    order = draw.sample(range(len(ids)), len(ids))
    prompts = Prompts([ids[row] for row in order], prefix=prefix or [])
    prompts.prefix_groups = np.array([prefix_groups[row] for row in order], dtype=np.int32)
    return prompts


def prefilled_tokens(lm: Any, prompts: Prompts, **options: Any) -> int:
    return sum(batch.spent.prompt_tokens for batch in rows_of(lm, prompts, **options))


def needed_tokens(prompts: Prompts) -> int:
    """Return the prompt tokens if the beginning of each prefix group is computed once."""
    again = sum(size - 1 for size in SIZES)
    return sum(map(len, prompts.ids)) - BEGINNING * again - len(prompts.prefix) * (len(prompts) - 1)


@pytest.mark.parametrize("options", [GREEDY, PAGED], ids=["slots", "paged"])
@pytest.mark.parametrize(("slots", "prefix"), [(1, []), (3, PREFIX), (6, []), (64, PREFIX)])
def test_every_row_has_the_answer_that_it_has_alone(lm: Any, options: Any, slots: int, prefix: list[int]) -> None:
    prompts = grouped_prompts(prefix=prefix)
    assert answers(lm, prompts, options=options, batch_size=slots) == one_by_one(lm, prompts)


@pytest.mark.parametrize("options", [GREEDY, PAGED], ids=["slots", "paged"])
@pytest.mark.parametrize("new_tokens", [NEW, 1])
@pytest.mark.parametrize("prefix", [[], PREFIX], ids=["no prefix", "prefix"])
def test_the_beginning_of_a_prefix_group_is_computed_once(
    lm: Any, options: Any, new_tokens: int, prefix: list[int]
) -> None:
    prompts = grouped_prompts(prefix=prefix)
    read = prefilled_tokens(lm, prompts, options=options, batch_size=32, max_new_tokens=new_tokens)
    assert read == needed_tokens(prompts)
    prompts.prefix_groups = None
    assert prefilled_tokens(lm, prompts, options=options, batch_size=32, max_new_tokens=new_tokens) > 2 * read


def test_fewer_tokens_go_through_the_model(lm: Any) -> None:
    prompts, tokens = grouped_prompts(), [0, 0]
    for index, prefix_groups in enumerate((prompts.prefix_groups, None)):
        prompts.prefix_groups = prefix_groups

        def count(module: Any, args: Any, index: int = index) -> None:
            tokens[index] += args[0].numel()

        hook = lm.base.get_input_embeddings().register_forward_pre_hook(count)
        answers(lm, prompts, batch_size=32, max_new_tokens=1)
        hook.remove()
    assert tokens[1] >= sum(map(len, prompts.ids))
    assert tokens[0] < 0.6 * tokens[1]


def test_a_prefix_group_that_does_not_fit_in_the_slots_is_computed_once(lm: Any) -> None:
    prompts = grouped_prompts((19,))
    assert prefilled_tokens(lm, prompts, batch_size=4) == BEGINNING + sum(len(ids) - BEGINNING for ids in prompts.ids)


@pytest.mark.parametrize("options", [SAMPLED, replace(GREEDY, logprobs=True)], ids=["sampled", "log probabilities"])
def test_answers_that_depend_on_last_digits_share_nothing(lm: Any, options: Any) -> None:
    prompts = grouped_prompts()
    assert prefilled_tokens(lm, prompts, options=options, batch_size=32) == sum(map(len, prompts.ids))


@examples(8)
@given(
    done=st.sets(st.integers(0, sum(SIZES) - 1)),
    slots=st.integers(1, 20),
    room=st.sampled_from([None, 60, 300]),
    paged=st.booleans(),
)
def test_a_resumed_job_gives_the_answers_of_an_uninterrupted_one(
    lm: Any, done: set[int], slots: int, room: int | None, paged: bool
) -> None:
    prompts = grouped_prompts(prefix=PREFIX)
    found = answers(
        lm,
        prompts,
        options=PAGED if paged else GREEDY,
        done=sorted(done),
        batch_size=slots,
        token_budget=room,
    )
    assert found == {row: ids for row, ids in one_by_one(lm, prompts).items() if row not in done}


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_rows_start_again_with_fewer_slots_if_memory_runs_out(
    lm: Any, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, admit, calls = grouped_prompts(), Slots.admit, []

    def limited(slots: Slots, requests: Any) -> Any:
        calls.append(len(requests))
        if len(calls) == failing:
            raise torch.OutOfMemoryError("full")
        return admit(slots, requests)

    monkeypatch.setattr(Slots, "admit", limited)
    assert answers(lm, prompts, batch_size=16) == one_by_one(lm, prompts)
    assert len(calls) > failing


def test_if_the_first_row_of_a_prefix_group_fails_the_others_are_answered(
    lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, admit = grouped_prompts(), Slots.admit
    bad = max(np.flatnonzero(prompts.prefix_groups == 5).tolist(), key=lambda row: len(prompts.ids[row]))

    def failing(slots: Slots, requests: Any) -> Any:
        if any(request.row == bad for request in requests):
            raise RuntimeError("no such token")
        return admit(slots, requests)

    monkeypatch.setattr(Slots, "admit", failing)
    expected: dict[int, Any] = {**one_by_one(lm, prompts), bad: "RuntimeError: no such token"}
    assert answers(lm, prompts, batch_size=16) == expected


def requests_of(lengths: list[int], prefix_groups: list[int] | None) -> RowRequests:
    def fetch(rows: Any) -> list[list[int]]:
        return [[1] * lengths[row] for row in rows]

    numbers = None if prefix_groups is None else np.array(prefix_groups, dtype=np.int32)
    key: Callable[[int], bytes] = bytes
    return RowRequests(np.array(lengths), np.ones(len(lengths), dtype=np.int64), fetch, key, prefix_groups=numbers)


def test_the_rows_of_a_prefix_group_follow_its_longest_one() -> None:
    lengths, prefix_groups = [5, 9, 7, 9, 3, 8, 6], [0, -1, 1, 1, -1, -1, 0]
    left = np.ones(7, dtype=np.bool_)
    assert plan(requests_of(lengths, prefix_groups), left)[0] == [1, 3, 2, 5, 6, 0, 4]
    left[3] = False
    assert plan(requests_of(lengths, prefix_groups), left)[0] == [1, 5, 2, 6, 0, 4]
    assert plan(requests_of(lengths, None), left)[0] == [1, 5, 2, 6, 0, 4]


def test_rows_of_different_prefix_groups_share_nothing(lm: Any) -> None:
    prompts = grouped_prompts()
    prompts.prefix_groups = np.arange(len(prompts), dtype=np.int32)
    assert prefilled_tokens(lm, prompts, batch_size=32) == sum(map(len, prompts.ids))
