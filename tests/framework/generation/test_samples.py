"""Tests of several samples per row: one prefill of each prompt, and answers that depend on seed, row and number."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import BatchResult
from partita.generation.sampled_prompts import SampledPrompts
from partita.generation.static_batches import plan_samples
from partita.generation.work_queue import PlannedRowQueue
from partita.lm.base import BatchSupport, GenerationOptions
from partita_trainers.process_group import ProcessGroup

from ...properties import examples
from ..lm.conftest import sharpen
from .conftest import nano_model
from .generating import generate_rows
from .test_scheduler import Prompts, prompts_of

SAMPLED = GenerationOptions({"do_sample": True, "temperature": 1.5, "top_k": 0})
LENGTHS = [3, 17, 9, 17, 1, 30, 12]
SAMPLES, NEW = 5, 6
PREFIX = list(range(30, 40))


@pytest.fixture(scope="module")
def lm() -> Any:
    lm = nano_model()
    sharpen(lm.module)
    return lm


def batches_of(lm: Any, prompts: Prompts, *, engine: str = "slots", **options: Any) -> list[BatchResult]:
    sampled = SampledPrompts(prompts, num_samples=SAMPLES)
    done = np.repeat(np.isin(np.arange(len(prompts)), options.pop("done", [])), SAMPLES)
    defaults: dict[str, Any] = {"options": SAMPLED, "max_new_tokens": NEW, "batch_size": 6, "seed": 1}
    return list(generate_rows(lm, sampled, engine=engine, done=done, **(defaults | {"num_samples": SAMPLES} | options)))


def answers(batches: Sequence[BatchResult]) -> dict[int, tuple[int, ...]]:
    results = [result for batch in batches for result in batch.results]
    found = {result.row: result.generated.ids for result in results if result.generated is not None}
    assert len(found) == len(results)
    return found


@examples(8)
@given(
    slots=st.integers(1, 20),
    engine=st.sampled_from(["slots", "slots", "static"]),
    prefix=st.booleans(),
    order=st.randoms(use_true_random=False),
    done=st.sets(st.integers(0, len(LENGTHS) - 1), max_size=3),
)
def test_samples_do_not_depend_on_slots_engine_order_or_other_rows(
    lm: Any, slots: int, engine: str, prefix: bool, order: random.Random, done: set[int]
) -> None:
    prompts = prompts_of(LENGTHS, prefix=PREFIX if prefix else ())
    straight = answers(batches_of(lm, prompts, num_samples=1, batch_size=1))
    rows = list(range(len(LENGTHS)))
    order.shuffle(rows)
    moved = Prompts([prompts.ids[row] for row in rows], prefix=prompts.prefix)
    moved.keys = prompts.keys[rows]
    again = answers(batches_of(lm, moved, engine=engine, batch_size=slots, done=[rows.index(row) for row in done]))
    expected = {
        place * SAMPLES + number: straight[row * SAMPLES + number]
        for place, row in enumerate(rows)
        if row not in done
        for number in range(SAMPLES)
    }
    assert again == expected


def test_the_first_sample_is_the_answer_of_a_row_without_further_samples(lm: Any) -> None:
    prompts = prompts_of(LENGTHS)
    alone = generate_rows(
        lm,
        prompts,
        engine="slots",
        options=SAMPLED,
        max_new_tokens=NEW,
        batch_size=4,
        seed=1,
        done=np.zeros(len(prompts), dtype=np.bool_),
    )
    samples = answers(batches_of(lm, prompts))
    assert answers(list(alone)) == {row: samples[row * SAMPLES] for row in range(len(prompts))}
    assert len(set(samples.values())) > len(LENGTHS) * SAMPLES // 2, "the samples of a row differ"


@pytest.mark.parametrize("slots", [5, 10, 64])
def test_the_prompt_of_a_row_is_computed_once_for_all_samples(lm: Any, slots: int) -> None:
    prompts = prompts_of([20, 30, 25], prefix=PREFIX)
    options = {"options": GenerationOptions({**SAMPLED.arguments, "min_new_tokens": NEW}), "batch_size": slots}
    batches = batches_of(lm, prompts, **options)
    assert sum(batch.spent.prompt_tokens for batch in batches) == 75 + len(PREFIX)
    apart = batches_of(lm, prompts, num_samples=1, **options)
    assert sum(batch.spent.prompt_tokens for batch in apart) == SAMPLES * 75 + len(PREFIX)
    assert answers(batches) == answers(apart)


def test_the_samples_of_rows_that_have_begun_are_finished_when_a_job_stops(lm: Any) -> None:
    stops: list[bool] = []

    def stopping() -> bool:
        stops.append(len(stops) > 1)
        return stops[-1]

    found = answers(batches_of(lm, prompts_of(LENGTHS), batch_size=7, stopping=stopping))
    rows = {row // SAMPLES for row in found}
    assert 0 < len(rows) < len(LENGTHS)
    assert len(found) == len(rows) * SAMPLES


@pytest.mark.parametrize("tokens", [pytest.param(80, marks=pytest.mark.long), 300])
def test_less_memory_than_planned_changes_no_sample(lm: Any, memory_ceiling: Any, tokens: int) -> None:
    prompts, budget = prompts_of(LENGTHS[-3:]), BatchBudget(12)
    usual = answers(batches_of(lm, prompts))
    with memory_ceiling(lm.base, tokens):
        assert answers(batches_of(lm, prompts, budget=budget, batch_size=12)) == usual
    assert budget.out_of_memory > 0


def test_a_prompt_that_fails_to_prefill_is_an_error_of_its_own_samples(lm: Any) -> None:
    prompts = prompts_of([5, 6, 7])
    prompts.ids[1][2] = 10**6
    batches = batches_of(lm, prompts, batch_size=15)
    results = {result.row: result for batch in batches for result in batch.results}
    assert {row for row, result in results.items() if result.generated is None} == set(range(5, 10))
    assert all("index out of range" in (results[row].error or "") for row in range(5, 10))


class Rank:
    """A rank whose shared counter has counted what another rank took."""

    world_size, rank = 2, 0

    def __init__(self) -> None:
        self.taken = 0

    def shared_counter(self, name: str) -> Any:
        def add(amount: int) -> int:
            self.taken += amount
            return self.taken - amount

        return add


def test_the_samples_of_a_row_are_taken_by_one_rank() -> None:
    ranks: ProcessGroup = Rank()  # type: ignore[assignment]
    queue = PlannedRowQueue(list(range(35)), process_group=ranks, together=SAMPLES)
    taken = []
    while queue.left:
        taken.append(list(queue.take(7)))
    assert [row for rows in taken for row in rows] == list(range(35))
    assert len(taken) > 1
    assert all(len(rows) % SAMPLES == 0 and rows[0] % SAMPLES == 0 for rows in taken)


@pytest.mark.parametrize("batch_size", [1, 3, 12])
@pytest.mark.parametrize("rows", ["padded", "equal lengths", "one row"])
def test_static_batches_of_the_samples_of_a_row_are_in_one_group(batch_size: int, rows: Any) -> None:
    lengths = np.repeat(np.array([4, 0, 9, 4, 2]), SAMPLES)
    plan = plan_samples(lengths, SAMPLES, batch_size=batch_size, support=BatchSupport(rows))
    groups = [{int(row) // SAMPLES for batch in group for row in batch} for group in plan]
    assert sorted(row for group in groups for row in group) == [0, 2, 3, 4]
    batches = [batch.tolist() for group in plan for batch in group]
    assert sorted(row for batch in batches for row in batch) == np.flatnonzero(lengths).tolist()
    assert max(map(len, batches)) <= (1 if rows == "one row" else batch_size)
    if rows == "equal lengths":
        assert all(len(set(lengths[batch])) == 1 for batch in batches)
