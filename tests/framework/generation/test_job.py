"""Tests of the result counts of a job."""

from dataclasses import replace

import pytest

from partita.generation.job import Tally
from partita.generation.requests import BatchResult, RowResult
from partita.generation.spent import Spent
from partita.lm.base import Generated


def tally(*, tokens: int, seconds: float, read: int, padded: int) -> Tally:
    """Return the counts of a rank that has answered one batch."""
    result = Tally()
    answer = Generated(tuple(range(tokens)), "x", "stop")
    results = (RowResult(0, answer), RowResult(1, None, "no"))
    spent = Spent(read, padded, seconds, prefill_seconds=seconds / 4, decode_seconds=seconds / 2, slot_steps=40)
    result.add(BatchResult(results, replace(spent, row_steps=30), batch_size=4))
    return result


def test_the_rate_of_tokens_is_that_of_all_concurrent_ranks() -> None:
    ranks = [tally(tokens=100, seconds=2.0, read=30, padded=40), tally(tokens=20, seconds=4.0, read=50, padded=60)]
    assert [one.tokens_per_second for one in ranks] == [50, 5]
    together = Tally.together(ranks)
    spent = together.spent
    assert (spent.seconds, spent.prefill_seconds, spent.decode_seconds) == (3.0, 0.75, 1.5)
    assert together.generated_tokens == 120
    assert together.tokens_per_second == pytest.approx(40)
    assert together.padding == pytest.approx(0.2)
    assert together.display_values == {
        "tokens_per_second": pytest.approx(40),
        "slots": "75% of 8",
        "padding": "20%",
        "prompt_tokens_per_second": pytest.approx(80 / 3),
    }


def test_nothing_is_shown_before_the_first_batch() -> None:
    assert (Tally().display_values, Tally().tokens_per_second, Tally().padding) == ({}, 0.0, 0.0)
