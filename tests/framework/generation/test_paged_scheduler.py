"""Tests of the scheduler with a paged KV cache: the answers are those of slots, also after failures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.generator import generate_requests, stream_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.generation.sampled_prompts import SampledPrompts
from partita.lm.base import GenerationRequest
from partita.lm.paged.cache import PagedKVCache
from partita.lm.paged.slots import PagedSlots

from ...properties import examples
from ..lm.conftest import sharpen
from .conftest import nano_model
from .test_scheduler import CONTEXT, GREEDY, LENGTHS, NEW, PREFIX, SAMPLED, answers, full, one_by_one, prompts_of

PAGED, PAGED_SAMPLED = (replace(options, kv_cache="paged") for options in (GREEDY, SAMPLED))


@pytest.fixture(scope="module")
def lm() -> Any:
    lm = nano_model()
    sharpen(lm.module)
    lm.why_no_slots(PAGED, tokens=8)  # the checks of both caches run once, before passes fail
    return lm


@contextmanager
def failing(lm: Any, fails: Callable[[Any, dict[str, Any]], BaseException | None]) -> Iterator[None]:
    """Return a context in which forward passes with a paged cache may fail."""

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if isinstance(kwargs.get("past_key_values"), PagedKVCache):
            error = fails(kwargs["past_key_values"], kwargs)
            if error is not None:
                raise error

    hook = lm.base.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(("slots", "prefix"), [(1, PREFIX), (4, []), (4, PREFIX), (64, PREFIX)])
def test_every_row_is_answered_once_as_if_alone(lm: Any, slots: int, prefix: list[int]) -> None:
    prompts = prompts_of(LENGTHS, prefix=prefix)
    assert answers(lm, prompts, options=PAGED, batch_size=slots) == one_by_one(lm, prompts)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_sampled_answers_are_those_of_slots(lm: Any, num_samples: int) -> None:
    prompts = SampledPrompts(prompts_of(LENGTHS[::num_samples], prefix=PREFIX), num_samples=num_samples)
    found = [answers(lm, prompts, options=options, num_samples=num_samples) for options in (SAMPLED, PAGED_SAMPLED)]
    assert found[0] == found[1]
    assert len(set(found[0].values())) > len(prompts) // 2


@examples(8)
@given(fails=st.sets(st.integers(0, 30), max_size=2), sampled=st.booleans(), prefix=st.booleans())
def test_out_of_memory_anywhere_loses_and_changes_nothing(
    lm: Any, fails: set[int], sampled: bool, prefix: bool
) -> None:
    prompts = prompts_of(LENGTHS, prefix=PREFIX if prefix else ())
    options, passes, limit = PAGED_SAMPLED if sampled else PAGED, iter(range(10**6)), BatchBudget(8)
    free = answers(lm, prompts, options=options)
    met: list[BaseException] = []

    def fail(cache: Any, given: Any) -> BaseException | None:
        if next(passes) in fails:
            met.append(full())
            return met[-1]
        return None

    with failing(lm, fail):
        found = answers(lm, prompts, options=options, batch_size=8, budget=limit)
    assert found == free
    assert limit.out_of_memory == len(met)


def test_a_row_that_fails_in_a_step_is_the_only_error(lm: Any) -> None:
    prompts = prompts_of([5] * 8)
    wanted = one_by_one(lm, prompts)
    token = wanted[3][2]
    assert token not in {token for row, ids in wanted.items() if row != 3 for token in ids}

    def fail(cache: Any, given: dict[str, Any]) -> BaseException | None:
        ids = given["input_ids"]
        return ValueError("no such token") if ids.shape[1] == 1 and token in ids[:, 0].tolist() else None

    with failing(lm, fail):
        found = answers(lm, prompts, options=PAGED, batch_size=8)
    assert "no such token" in str(found.pop(3))
    assert found == {row: ids for row, ids in wanted.items() if row != 3}


def test_requests_are_answered_and_streamed_as_in_slots(lm: Any) -> None:
    requests = [GenerationRequest(ids, min(NEW, CONTEXT - len(ids))) for ids in prompts_of(LENGTHS).ids]
    settings = [GenerationSettings(options, BatchBudget(4), 0) for options in (GREEDY, PAGED)]
    wanted = generate_requests(lm, requests, settings[0])
    assert generate_requests(lm, requests, settings[1]) == wanted
    texts = dict.fromkeys(range(len(requests)), "")
    for row, piece in stream_requests(lm, requests, settings[1]):
        texts[row] += piece
    assert list(texts.values()) == [answer.text for answer in wanted]


def test_the_log_says_that_the_cache_is_paged(lm: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="partita")
    opened = lm.open_slots(PAGED, slots=2, tokens=16, prefix=(), seed=0)
    assert isinstance(opened, PagedSlots)
    assert caplog.messages == ["answers are generated with a paged KV cache"]
