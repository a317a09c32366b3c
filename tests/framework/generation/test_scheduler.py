"""Tests of the slot engine on a real model: every row is answered once, also after failures."""

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.engine import choose_engine
from partita.generation.generator import generate_requests, scheduler_of_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.prefill_plan import PLANNED_PROMPTS
from partita.generation.requests import BatchResult, GenerationSettings, too_large
from partita.generation.spent import Spent
from partita.lm.base import SHORTEST_PREFIX, Generated, GenerationOptions, GenerationRequest, SlotRequest
from partita.lm.slots.kv_cache import SlotKVCache
from partita.lm.slots.slots import Slots
from partita_schema.errors import JobError, ModelError, OutOfMemory

from ...properties import examples
from ..lm.conftest import sharpen
from .conftest import nano_model
from .generating import generate_rows

GREEDY = GenerationOptions({"do_sample": False})
SAMPLED = GenerationOptions({"do_sample": True, "top_k": 0})
CONTEXT, NEW = 64, 8
PREFIX = list(range(30, 40))
DEVICE = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def lm() -> Any:
    lm = nano_model()
    sharpen(lm.module)
    return lm


@pytest.fixture(autouse=True)
def untouched(lm: Any) -> Iterator[None]:
    """Check that a test leaves no hooks or changes on the model, which is in training mode, unlike generation."""

    def traces() -> Any:
        modules = list(lm.module.modules())
        hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in modules]
        return hooks, [module.training for module in modules], lm.base.config._attn_implementation

    lm.why_no_slots(GREEDY, tokens=8)
    lm.module.train()
    before = traces()
    yield
    assert traces() == before


class Prompts:
    """Prompts given as tokens."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, prefix: Sequence[int] = ()) -> None:
        self.ids = [list(prompt) for prompt in prompts]
        self.lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        self.keys = np.array([np.frombuffer(row.to_bytes(16, "little"), dtype=np.uint8) for row in range(len(prompts))])
        digests = [hashlib.blake2b(repr(prompt).encode(), digest_size=16).digest() for prompt in self.ids]
        self.digests = np.array(digests, dtype="V16")
        self.prefix = prefix
        self.prefix_groups: Any = None
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def sampling_key(self, row: int) -> bytes:
        return self.keys[row].tobytes()

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        return [list(self.ids[index]) for index in indices]


def prompts_of(lengths: Sequence[int], *, prefix: Sequence[int] = (), seed: int = 0) -> Prompts:
    """Return random prompts of these lengths with a common prefix."""
    draw = random.Random(seed)
    ids = [[*prefix, *(draw.randrange(50, 250) for _ in range(length))] for length in lengths]
    return Prompts(ids, prefix=prefix)


def rows_of(lm: Any, prompts: Prompts, *, done: Sequence[int] = (), **options: Any) -> Iterator[BatchResult]:
    mask = np.zeros(len(prompts), dtype=np.bool_)
    mask[list(done)] = True
    defaults: dict[str, Any] = {"options": GREEDY, "max_new_tokens": NEW, "batch_size": 6, "seed": 1}
    return generate_rows(lm, prompts, engine="slots", done=mask, **(defaults | options))


def outcomes(batches: Sequence[BatchResult]) -> dict[int, tuple[int, ...] | str]:
    """Return the tokens or error of every row; each row appears once."""
    actual: dict[int, tuple[int, ...] | str] = {}
    for result in (result for batch in batches for result in batch.results):
        assert result.row not in actual, f"row {result.row}was returned twice"
        actual[result.row] = result.generated.ids if result.generated is not None else str(result.error)
    return actual


def answers(lm: Any, prompts: Prompts, **options: Any) -> dict[int, tuple[int, ...] | str]:
    return outcomes(list(rows_of(lm, prompts, **options)))


def one_by_one(lm: Any, prompts: Prompts) -> dict[int, tuple[int, ...]]:
    """Return greedy answers of the static engine to each row alone."""
    results = {}
    for row, ids in enumerate(prompts.ids):
        request = GenerationRequest(ids, min(NEW, CONTEXT - len(ids)))
        results[row] = lm.generate([request], GREEDY, seed=0)[0].ids
    return results


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> list[list[SlotRequest]]:
    """Record the groups of prompts that are prefilled."""
    groups: list[list[SlotRequest]] = []
    admit = Slots.admit

    def noting(slots: Slots, requests: Sequence[SlotRequest]) -> Any:
        groups.append(list(requests))
        return admit(slots, requests)

    monkeypatch.setattr(Slots, "admit", noting)
    return groups


LENGTHS = [3, 17, 9, 17, 1, 12, 30, 5, 17, 8, 2, 1, 25, 40, 6]


# Results


@pytest.mark.parametrize(
    ("slots", "prefix"), [(1, PREFIX), (4, []), (4, PREFIX), (64, PREFIX), (4, PREFIX[: SHORTEST_PREFIX - 1])]
)
def test_every_row_is_answered_once_longest_first_as_if_alone(
    lm, admitted: list[list[SlotRequest]], slots: int, prefix: list[int]
) -> None:
    prompts = prompts_of(LENGTHS, prefix=prefix)
    assert answers(lm, prompts, batch_size=slots) == one_by_one(lm, prompts)
    read = [len(request.input_ids) for group in admitted for request in group]
    assert read == sorted(read, reverse=True)
    assert Counter(request.row for group in admitted for request in group) == dict.fromkeys(range(len(prompts)), 1)


def test_no_rows_need_no_work(lm) -> None:
    assert answers(lm, prompts_of([])) == {}
    assert answers(lm, prompts_of([4, 5]), done=[0, 1]) == {}


def test_rows_that_fill_the_context_are_skipped_and_others_get_the_remaining_tokens(lm) -> None:
    prompts = prompts_of([CONTEXT - 1, CONTEXT, CONTEXT + 9, CONTEXT - 3, 4])
    result = answers(lm, prompts)
    assert set(result) == {0, 3, 4}
    wanted = one_by_one(lm, prompts_of([CONTEXT - 1, 1, 1, 1, 1]))
    assert result[0] == wanted[0]
    assert len(result[0]) <= 1
    assert len(result[3]) <= 3


def test_equal_prompts_are_computed_once_with_greedy_answers(lm, admitted: list[list[SlotRequest]]) -> None:
    once = prompts_of([5, 9, 2])
    prompts = Prompts([once.ids[place] for place in (0, 1, 0, 2, 1, 0, 0)])
    result = answers(lm, prompts, batch_size=3)
    assert len([request for group in admitted for request in group]) == 3
    assert result == one_by_one(lm, prompts)
    admitted.clear()
    assert answers(lm, prompts, done=[0, 1, 2]) == {row: result[row] for row in (3, 4, 5, 6)}
    assert len([request for group in admitted for request in group]) == 3, "the first of them is done"


def test_short_prompts_are_not_padded_to_long_ones_if_two_passes_are_faster(
    lm, admitted: list[list[SlotRequest]]
) -> None:
    prompts = prompts_of([48, 8, 47, 7, 46, 6, 45, 5])
    assert answers(lm, prompts, batch_size=8) == one_by_one(lm, prompts)
    assert [[request.row for request in group] for group in admitted] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_prompts_of_similar_lengths_are_prefilled_together(lm, admitted: list[list[SlotRequest]]) -> None:
    prompts = prompts_of([48, 47, 40, 39, 38, 36, 35, 32])
    assert answers(lm, prompts, batch_size=8) == one_by_one(lm, prompts)
    assert [len(group) for group in admitted] == [8]


def test_more_short_prompts_than_are_planned_fill_a_pass(
    lm, admitted: list[list[SlotRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm, "few_kernels", False)  # the number of prompts is not rounded for oneDNN
    prompts = prompts_of([3] * (PLANNED_PROMPTS + 6))
    assert answers(lm, prompts, batch_size=PLANNED_PROMPTS + 6) == one_by_one(lm, prompts)
    assert [len(group) for group in admitted] == [PLANNED_PROMPTS + 6]


def test_passes_are_planned_again_without_cancelled_rows(lm) -> None:
    requests = [GenerationRequest(ids, NEW) for ids in prompts_of([48, 8, 47, 7, 46, 6, 45, 5]).ids]
    scheduler = scheduler_of_requests(lm, requests, GenerationSettings(GREEDY, BatchBudget(8), 1))
    assert scheduler.refill()
    with closing(lm.open_slots(GREEDY, slots=8, tokens=CONTEXT, prefix=(), seed=1)) as slots:
        waiting = scheduler.waiting
        assert waiting.planned_count(slots, free=8, prefix=0) == 4
        assert waiting.planned == [4]
        scheduler.cancel({0, 2})
        assert waiting.planned_count(slots, free=8, prefix=0) == 2
        assert waiting.planned == [4]


def test_equal_prompts_are_each_sampled(lm, admitted: list[list[SlotRequest]]) -> None:
    prompts = Prompts([prompts_of([5]).ids[0]] * 6)
    result = answers(lm, prompts, options=SAMPLED, batch_size=3)
    assert len([request for group in admitted for request in group]) == 6
    assert len(set(result.values())) == 6


def test_a_shared_prefix_is_computed_once(lm) -> None:
    prompts, read = prompts_of([4, 4, 4, 4], prefix=PREFIX), []
    hook = lm.base.get_input_embeddings().register_forward_hook(lambda *given: read.append(tuple(given[1][0].shape)))
    batches = list(rows_of(lm, prompts, max_new_tokens=1, batch_size=4))
    hook.remove()
    assert read == [(1, len(PREFIX)), (4, 4)]
    assert sum(batch.spent.prompt_tokens for batch in batches) == len(PREFIX) + 16


def test_a_prompt_equal_to_the_shared_prefix_keeps_its_last_token(lm) -> None:
    prompts = Prompts([PREFIX, [*PREFIX, 60, 61], [*PREFIX, 70]], prefix=PREFIX)
    assert answers(lm, prompts) == one_by_one(lm, prompts)


def test_steps_and_slots_in_use_are_counted(lm) -> None:
    batches = list(rows_of(lm, prompts_of(LENGTHS), batch_size=4))
    spent = sum((batch.spent for batch in batches), Spent())
    assert 0 < spent.row_steps <= spent.slot_steps
    assert spent.row_steps >= sum(len(ids) - 1 for ids in outcomes(batches).values())
    assert spent.prompt_tokens == sum(LENGTHS)
    assert spent.padded_tokens >= sum(LENGTHS)


@examples(8)
@given(
    done=st.sets(st.integers(0, 14)),
    slots=st.integers(1, 20),
    room=st.sampled_from([None, 40, 300]),
    sampled=st.booleans(),
    prefix=st.booleans(),
)
def test_a_resumed_job_gives_the_answers_of_an_uninterrupted_one(
    lm, done: set[int], slots: int, room: int | None, sampled: bool, prefix: bool
) -> None:
    prompts = prompts_of([*LENGTHS[:12], *LENGTHS[:3]], prefix=PREFIX if prefix else ())
    prompts = Prompts([*prompts.ids[:12], *prompts.ids[:3]], prefix=prompts.prefix)
    options = SAMPLED if sampled else GREEDY
    straight = answers(lm, prompts, options=options)
    again = answers(lm, prompts, options=options, done=sorted(done), batch_size=slots, token_budget=room)
    assert again == {row: ids for row, ids in straight.items() if row not in done}


def test_another_seed_gives_other_samples(lm) -> None:
    prompts = prompts_of(LENGTHS)
    assert answers(lm, prompts, options=SAMPLED, seed=1) != answers(lm, prompts, options=SAMPLED, seed=2)


def test_more_slots_are_opened_for_shorter_rows_if_memory_allows(lm) -> None:
    prompts, rows = prompts_of([50] * 2 + [2] * 20), []
    hook = lm.base.get_input_embeddings().register_forward_hook(lambda *given: rows.append(len(given[1][0])))
    batches = list(rows_of(lm, prompts, batch_size=2, token_budget=2 * (50 + NEW)))
    hook.remove()
    assert outcomes(batches) == one_by_one(lm, prompts)
    assert rows[0] == 2
    assert max(rows) == 8


# Memory


def kind_of(kwargs: dict[str, Any]) -> str:
    """Return the purpose of a forward pass of the model."""
    layout = kwargs["past_key_values"].layout
    if layout.positions_NL is not None:
        return "step"
    return "open" if layout.start == 0 and kwargs["input_ids"].tolist() == [PREFIX] else "read"


@contextmanager
def failing(lm: Any, fails: Callable[[str, SlotKVCache, torch.Tensor], BaseException | None]) -> Iterator[list[str]]:
    """Return a context in which passes may fail; it yields the kinds of all passes."""
    kinds: list[str] = []

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(kwargs.get("past_key_values"), SlotKVCache):
            return
        kinds.append(kind_of(kwargs))
        error = fails(kinds[-1], kwargs["past_key_values"], kwargs["input_ids"])
        if error is not None:
            raise error

    hook = lm.base.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield kinds
    finally:
        hook.remove()


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("kind", ["open", "read", "step"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_out_of_memory_halves_the_slots_and_loses_nothing(lm, kind: str, options: Any, caplog: Any) -> None:
    prompts, limit = prompts_of(LENGTHS, prefix=PREFIX), BatchBudget(12)
    free = answers(lm, prompts, options=options, batch_size=12)
    caplog.set_level(logging.WARNING, logger="partita")
    with failing(lm, lambda result, pool, ids: full() if result == kind and pool.layout.slots > 3 else None):
        batches = list(rows_of(lm, prompts, options=options, batch_size=12, budget=limit))
    assert outcomes(batches) == free
    assert limit.out_of_memory == sum(batch.spent.out_of_memory for batch in batches) == 2
    assert limit.current_limit == 3
    assert batches[-1].batch_size == 3
    assert [message.split(" of up to")[0] for message in caplog.messages] == [
        "out of memory with 12 rows",
        "out of memory with 6 rows",
    ]


@examples(8)
@given(
    fails=st.sets(st.integers(0, 30), max_size=2),
    sampled=st.booleans(),
    prefix=st.booleans(),
    room=st.sampled_from([None, 500]),
)
def test_out_of_memory_anywhere_loses_and_changes_nothing(
    lm, fails: set[int], sampled: bool, prefix: bool, room: int | None
) -> None:
    prompts = prompts_of(LENGTHS, prefix=PREFIX if prefix else ())
    options, passes, limit = SAMPLED if sampled else GREEDY, iter(range(10**6)), BatchBudget(8)
    free = answers(lm, prompts, options=options)
    met = []
    with failing(lm, lambda *_: met.append(full()) or met[-1] if next(passes) in fails else None):
        result = answers(lm, prompts, options=options, batch_size=8, budget=limit, token_budget=room)
    assert result == free
    assert limit.out_of_memory == len(met)


def test_other_rows_give_the_same_answers_with_a_real_memory_limit(lm, memory_ceiling: Any) -> None:
    prompts = prompts_of(LENGTHS)
    free = answers(lm, prompts)
    for ceiling in (400, 200, 100):
        limit = BatchBudget(15)
        with memory_ceiling(lm.base, ceiling) as passes:
            assert answers(lm, prompts, batch_size=15, budget=limit) == free
        assert limit.out_of_memory == sum(held > ceiling for _, held in passes) > 0


def test_a_row_that_does_not_fit_alone_is_an_error_and_the_limit_is_restored(
    lm, memory_ceiling: Any, caplog: Any
) -> None:
    prompts, limit = prompts_of([5] * 8 + [55] + [5] * 6), BatchBudget(6)
    free = one_by_one(lm, prompts)
    caplog.set_level(logging.INFO, logger="partita.generation.scheduler")
    with memory_ceiling(lm.base, 110) as passes:
        batches = list(rows_of(lm, prompts, budget=limit))
    result = outcomes(batches)
    assert result.pop(8) == too_large(55, NEW)
    assert too_large(55, NEW).startswith("does not fit in memory even alone: 55 prompt tokens and up to 8 new tokens;")
    assert result == {row: ids for row, ids in free.items() if row != 8}
    assert (limit.current_limit, limit.limit_tokens) == (6, None)
    assert max(rows for rows, _ in passes[4:]) == 6, "the others continue"
    assert caplog.messages[-1] == f"a row {too_large(55, NEW)}; continuing with 6 rows at a time"


def test_a_row_whose_steps_do_not_fit_alone_is_an_error_too(lm) -> None:
    prompts, limit = prompts_of([5] * 4 + [50] + [5] * 4), BatchBudget(4)
    free = one_by_one(lm, prompts)
    with failing(lm, lambda kind, pool, ids: full() if kind == "step" and pool.layout.width > 40 else None):
        result = answers(lm, prompts, budget=limit, batch_size=4)
    assert result == free | {4: too_large(50, NEW)}
    assert limit.current_limit == 4


def test_if_nothing_fits_every_row_is_reported(lm, memory_ceiling: Any) -> None:
    with memory_ceiling(lm.base, 1):
        result = answers(lm, prompts_of([5] * 5 + [6], prefix=PREFIX), batch_size=3)
    assert result == dict.fromkeys(range(5), too_large(15, NEW)) | {5: too_large(16, NEW)}


def test_slots_that_ran_out_of_memory_are_freed_before_new_ones_are_opened(lm) -> None:
    import weakref

    pools: list[Any] = []

    def fail(kind: str, pool: SlotKVCache, ids: torch.Tensor) -> BaseException | None:
        known = [reference() for reference in pools]
        if pool not in known:
            assert not any(other is not None for other in known), "the old pool is still held"
            pools.append(weakref.ref(pool))
        del known
        return full() if kind == "step" and pool.layout.slots > 2 else None

    with failing(lm, fail):
        answers(lm, prompts_of(LENGTHS), batch_size=8)
    assert len(pools) == 3


# Failing rows


@pytest.mark.parametrize("slots", [1, 4, 20])
def test_a_row_that_cannot_be_prefilled_is_the_only_error(lm, slots: int) -> None:
    prompts, limit = prompts_of([*LENGTHS], prefix=PREFIX), BatchBudget(slots)
    free = one_by_one(lm, prompts)
    for bad in (1, 4, 13):
        prompts.ids[bad][-1] = 10**6
    same = Prompts([*prompts.ids, prompts.ids[4], prompts.ids[0]], prefix=PREFIX)
    result = answers(lm, same, batch_size=slots, budget=limit)
    error = "IndexError: index out of range in self"
    assert result == free | dict.fromkeys((1, 4, 13, 15), error) | {16: free[0]}
    assert (limit.current_limit, limit.out_of_memory) == (slots, 0)


def test_a_shared_prefix_that_cannot_be_prefilled_is_an_error_of_all_rows(lm, caplog: Any) -> None:
    prompts = prompts_of([3, 4, 5], prefix=[*PREFIX, 10**6])
    caplog.set_level(logging.INFO, logger="partita.generation.scheduler")
    assert answers(lm, prompts) == dict.fromkeys(range(3), "IndexError: index out of range in self")
    reason = "the shared prefix of the prompts cannot be computed: IndexError: index out of range in self"
    assert caplog.messages[0] == reason


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_that_fails_in_a_step_is_the_only_error(lm, options: Any, caplog: Any) -> None:
    prompts, limit = prompts_of(LENGTHS, prefix=PREFIX), BatchBudget(5)
    free = answers(lm, prompts, options=options)
    bad = free[6][2]
    spoiled = {row for row, ids in free.items() if bad in ids[:-1]}
    assert 6 in spoiled
    assert len(spoiled) < len(free)

    def fail(kind: str, pool: SlotKVCache, ids: torch.Tensor) -> BaseException | None:
        return ValueError("no such luck") if kind == "step" and bad in ids else None

    caplog.set_level(logging.INFO, logger="partita.generation.scheduler")
    with failing(lm, fail):
        result = answers(lm, prompts, options=options, batch_size=5, budget=limit)
    assert result == free | dict.fromkeys(spoiled, "ValueError: no such luck")
    assert (limit.current_limit, limit.out_of_memory) == (5, 0)
    assert "a step of 5 rows failed and they are answered one by one: ValueError: no such luck" in caplog.messages


def test_a_row_with_nan_logits_is_the_only_error(lm) -> None:
    prompts = prompts_of(LENGTHS)
    free = one_by_one(lm, prompts)
    poison = next(t for t in range(2, 50) if not any(t in ids for ids in free.values()))
    prompts.ids[5].append(poison)
    prompts.lengths[5] += 1
    hook = lm.base.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == poison)[..., None], torch.nan)
    )
    result = answers(lm, prompts, batch_size=3)
    hook.remove()
    assert result == free | {5: "the model's scores are NaN"}


def test_a_row_may_run_out_of_memory_when_rows_are_answered_one_by_one(lm) -> None:
    prompts, limit = prompts_of([20, 9, 8, 7]), BatchBudget(4)
    free = one_by_one(lm, prompts)

    def fail(kind: str, pool: SlotKVCache, ids: torch.Tensor) -> BaseException | None:
        if kind == "step" and len(ids) > 1:
            return ValueError("never together")
        return full() if kind == "step" and pool.layout.tokens == 28 else None

    with failing(lm, fail):
        batches = list(rows_of(lm, prompts, budget=limit, batch_size=4))
    assert outcomes(batches) == free | {0: too_large(20, NEW)}
    assert (limit.current_limit, limit.out_of_memory) == (4, 1)


def test_out_of_memory_while_prompts_are_prefilled_one_by_one_loses_none(lm) -> None:
    prompts, limit, failed = prompts_of([20, 9, 8, 7, 6]), BatchBudget(4), []
    free = one_by_one(lm, prompts)

    def fail(kind: str, pool: SlotKVCache, ids: torch.Tensor) -> BaseException | None:
        if kind == "read" and len(ids) > 1:
            return ValueError("never together")
        if kind == "read" and ids.shape[1] == 9 and not failed:
            failed.append(full())
            return failed[0]
        return None

    with failing(lm, fail):
        assert answers(lm, prompts, budget=limit, batch_size=4) == free
    assert (len(failed), limit.out_of_memory, limit.current_limit) == (1, 1, 2)


# The end of a job


@pytest.mark.parametrize("kind", ["open", "read", "step"])
def test_a_broken_device_ends_the_job(lm, kind: str) -> None:
    prompts, result = prompts_of(LENGTHS, prefix=PREFIX), []
    free = answers(lm, prompts)
    passes: Counter[str] = Counter()

    def fail(now: str, pool: SlotKVCache, ids: torch.Tensor) -> BaseException | None:
        passes[now] += 1
        last = {"open": 1, "read": 6, "step": 20}[kind]
        return RuntimeError(DEVICE) if now == kind and passes[now] >= last else None

    with failing(lm, fail), pytest.raises(JobError) as caught:
        result.extend(rows_of(lm, prompts, batch_size=2))
    assert str(caught.value) == (
        f"the device failed and cannot continue: {DEVICE}. The answers so far are saved; start again, with "
        "CUDA_LAUNCH_BLOCKING=1 to see where it fails"
    )
    kept = outcomes(result)
    assert kept.items() <= free.items()
    assert bool(kept) == (kind != "open")


@examples(8)
@given(st.integers(0, 40), st.booleans(), st.booleans())
def test_an_interrupt_is_raised_and_earlier_answers_are_complete(lm, place: int, sampled: bool, prefix: bool) -> None:
    prompts, options = prompts_of(LENGTHS, prefix=PREFIX if prefix else ()), SAMPLED if sampled else GREEDY
    straight = answers(lm, prompts, options=options)
    passes, result = iter(range(10**6)), []
    with failing(lm, lambda *_: KeyboardInterrupt() if next(passes) == place else None) as kinds:
        try:
            result.extend(rows_of(lm, prompts, options=options, batch_size=3))
        except KeyboardInterrupt:
            assert len(kinds) == place + 1
        else:
            assert len(kinds) <= place
    assert lm.module.training
    kept = outcomes(result)
    assert kept.items() <= straight.items()
    assert kept | answers(lm, prompts, options=options, done=list(kept)) == straight


@examples(8)
@given(st.integers(0, 40), st.booleans())
def test_a_stopping_job_finishes_started_rows_and_starts_no_others(lm, place: int, prefix: bool) -> None:
    prompts = prompts_of(LENGTHS, prefix=PREFIX if prefix else ())
    straight = answers(lm, prompts)
    asked, started = Counter[str](), set[int]()
    admit = Slots.admit

    def noted(self: Slots, requests: Sequence[SlotRequest]) -> Any:
        assert asked["steps"] <= place, "no row is started"
        started.update(request.row for request in requests)
        return admit(self, requests)

    def stopping() -> bool:
        asked["steps"] += 1
        return asked["steps"] > place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "admit", noted)
        kept = outcomes(list(rows_of(lm, prompts, batch_size=3, stopping=stopping)))
    assert kept == {row: straight[row] for row in started}
    assert kept | answers(lm, prompts, done=list(kept)) == straight
    assert lm.module.training


def test_started_rows_that_take_too_long_are_abandoned(lm) -> None:
    asked = Counter[str]()

    def stopping() -> bool:
        asked["steps"] += 1
        if asked["steps"] == 5:
            raise KeyboardInterrupt
        return asked["steps"] > 2

    results: list[BatchResult] = []
    with pytest.raises(KeyboardInterrupt):
        results.extend(rows_of(lm, prompts_of([9] * 6), batch_size=3, stopping=stopping))
    assert not results, "answers of eight tokens take more than four steps"
    assert lm.module.training


def test_an_abandoned_job_does_not_change_the_model(lm) -> None:
    rows = rows_of(lm, prompts_of(LENGTHS), batch_size=2)
    assert next(rows).results
    assert not lm.module.training
    rows.close()  # type: ignore[attr-defined]
    assert lm.module.training


def test_missing_prompts_end_the_job(lm) -> None:
    prompts = prompts_of(LENGTHS)

    def gone(indices: Sequence[int]) -> list[list[int]]:
        raise OSError("no such file")

    prompts.prompts = gone  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no such file"):
        answers(lm, prompts)


# Requests


def requests_of(lengths: Sequence[int], limits: Sequence[int]) -> list[GenerationRequest]:
    return [GenerationRequest(ids, limit) for ids, limit in zip(prompts_of(lengths).ids, limits, strict=True)]


def ask(lm: Any, requests: Sequence[GenerationRequest], *, options: Any = GREEDY, rows: int = 3) -> list[Generated]:
    capacity = BatchBudget(rows)
    return generate_requests(lm, requests, GenerationSettings(options, capacity, 0))


def test_requests_are_answered_in_order_each_up_to_its_limit(lm) -> None:
    requests = requests_of([3, 40, 9, 9, 1], [50, 2, 7, 1, 30])
    assert ask(lm, requests) == [lm.generate([request], GREEDY, seed=0)[0] for request in requests]
    assert ask(lm, requests[::-1], rows=1) == ask(lm, requests)[::-1]
    assert ask(lm, []) == []


def test_an_error_of_a_request_is_raised(lm) -> None:
    requests = requests_of([3, 9], [5, 5])
    with pytest.raises(IndexError, match="index out of range"):
        ask(lm, [*requests, GenerationRequest([5, 10**6], 5)])
    with (
        failing(lm, lambda kind, *_: ValueError("no") if kind == "step" else None),
        pytest.raises(ValueError, match="no"),
    ):
        ask(lm, requests)
    with (
        failing(lm, lambda *_: RuntimeError(DEVICE)),
        pytest.raises(JobError, match=r"^the device failed and cannot"),
    ):
        ask(lm, requests)


def test_a_request_that_does_not_fit_alone_is_reported(lm, memory_ceiling: Any) -> None:
    with memory_ceiling(lm.base, 40), pytest.raises(OutOfMemory) as caught:
        ask(lm, requests_of([3, 50, 4], [5, 6, 5]))
    assert str(caught.value) == f"a prompt {too_large(50, 6)}"


@pytest.mark.parametrize("slots", [True, False])
def test_a_request_with_nan_logits_is_reported(lm, slots: bool) -> None:
    hook = lm.base.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output.masked_fill((inputs[0] == 7)[..., None], torch.nan)
    )
    try:
        with pytest.raises(ModelError, match=r"^the model's scores are NaN$"):
            ask(lm, [*requests_of([3, 9], [5, 5]), GenerationRequest([5, 7], 5)], options=replace(GREEDY, slots=slots))
    finally:
        hook.remove()


# Models without slots


def test_the_log_reports_why_rows_are_not_answered_in_slots(lm, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="partita.generation.engine")
    lengths = prompts_of(LENGTHS).lengths
    beams = GenerationOptions({"do_sample": False, "num_beams": 2})
    assert choose_engine(lm, lengths, options=beams, max_new_tokens=NEW) == "static"
    off = GenerationOptions({"do_sample": False}, slots=False)
    assert choose_engine(lm, lengths, options=off, max_new_tokens=NEW) == "static"
    requests = requests_of([3, 9], [5, 4])
    assert ask(lm, requests, options=off) == ask(lm, requests)
    text = "answers are generated in sorted batches, not in slots: "
    assert caplog.messages == [f"{text}{reason}" for reason in ("beam search", *["generation.slots is false"] * 2)]
    assert choose_engine(lm, lengths, options=GREEDY, max_new_tokens=NEW) == "slots"


def test_the_longest_row_decides_whether_a_sliding_window_matters(
    lm, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, logger="partita.generation.engine")
    monkeypatch.setattr(lm.base.config, "sliding_window", 20, raising=False)
    lengths = prompts_of([3, 12, CONTEXT]).lengths
    assert choose_engine(lm, lengths, options=GREEDY, max_new_tokens=8) == "slots", "the third fills the context"
    assert choose_engine(lm, lengths, options=GREEDY, max_new_tokens=9) == "static"
    assert caplog.messages == [
        "answers are generated in sorted batches, not in slots: a sliding window of 20 tokens, and rows of up to 21"
    ]
