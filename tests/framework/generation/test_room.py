"""Tests of the number of slots under a token budget: shorter rows get more of them."""

from typing import Any

import numpy as np
import pytest

from partita.generation.generator import scheduler_of_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita_trainers.batch_size.probe import BatchSize

from .conftest import nano_model

GREEDY = GenerationOptions({"do_sample": False})
NEW = 4
LENGTHS = [56, 50, 52, 20, 21, 22, 23, 8, 8, 9, 10, 11, 6, 5, 4, 7, 3, 9, 9, 8]


@pytest.fixture
def lm() -> Any:
    return nano_model()


def answered(
    lm: Any, monkeypatch: pytest.MonkeyPatch, budget: BatchBudget | None = None
) -> tuple[list[tuple[int, int]], dict[int, Any]]:
    """Return (slots, tokens per slot) of all pools that were opened, and the answers."""
    opened = []
    real = type(lm).open_slots

    def spy(self: Any, options: Any, *, slots: int, tokens: int, **more: Any) -> Any:
        opened.append((slots, tokens))
        return real(self, options, slots=slots, tokens=tokens, **more)

    monkeypatch.setattr(type(lm), "open_slots", spy)
    rng = np.random.default_rng(1)
    requests = [GenerationRequest(rng.integers(5, 250, length).tolist(), NEW) for length in LENGTHS]
    settings = GenerationSettings(GREEDY, budget or BatchBudget(2), 0)
    run = scheduler_of_requests(lm, requests, settings)
    actual = {result.row: result.generated for batch in run.completions() for result in batch.results}
    monkeypatch.undo()
    return opened, actual


def test_more_slots_are_used_for_shorter_rows_with_the_same_answers(lm: Any, monkeypatch: Any) -> None:
    usual, before = answered(lm, monkeypatch)
    assert usual == [(2, 60)]
    opened, after = answered(lm, monkeypatch, BatchBudget(2, token_budget=2 * 60))
    assert after == before
    assert opened == [(2, 60), (4, 26), (8, 12)]  # rows of 23 and of 9 tokens wait when a pool is drained
    assert all(slots * tokens <= 2 * 60 for slots, tokens in opened)


def test_after_out_of_memory_the_budget_is_lowered(lm: Any, monkeypatch: Any) -> None:
    budget = BatchBudget(2, token_budget=2 * 60, current_limit=1, limit_tokens=60, out_of_memory=1, max_rows=2)
    opened, _ = answered(lm, monkeypatch, budget)
    assert opened == [(1, 60), (2, 27), (4, 13)]


@pytest.mark.parametrize(("rows", "fits", "room"), [(8, 8, 8 * 140), (6, 8, None)])
def test_only_a_size_limited_by_memory_may_grow_for_shorter_rows(rows: int, fits: int, room: int | None) -> None:
    size = BatchSize(rows=rows, origin="tuned", device="cpu", max_fitting=fits, prompt_tokens=100, new_tokens=40)
    tuner = object.__new__(BatchSizeTuner)
    tuner.budgets, tuner.used = {}, {}
    assert tuner.budget("generation", size).token_budget == room


def test_a_configured_number_of_rows_is_not_exceeded() -> None:
    tuner = object.__new__(BatchSizeTuner)
    tuner.budgets, tuner.used = {}, {}
    assert tuner.budget("generation", BatchSize(rows=8, origin="file", device="cpu")).token_budget is None
