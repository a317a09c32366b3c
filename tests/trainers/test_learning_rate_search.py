"""Tests of choosing a learning rate from a loss curve."""

from contextlib import nullcontext
from typing import Any

import pytest

from partita_schema.errors import DivergenceError, OtherRankError, TrainingError
from partita_trainers import learning_rate_search
from partita_trainers.learning_rate_search import find_learning_rate, suggest


def test_a_tenth_of_the_rate_with_the_lowest_loss_is_chosen() -> None:
    rates = [10 ** (-6 + number / 10) for number in range(60)]
    losses = [3.0 if rate < 1e-3 else 3.0 - 2.0 * (rate / 1e-2) if rate <= 1e-2 else 3.0 + rate * 50 for rate in rates]
    assert 5e-4 < suggest(rates, losses) < 3e-3


def test_no_finite_loss_is_an_error() -> None:
    with pytest.raises(
        TrainingError, match=r"the range test saw no finite loss; write trainer\.learning_rate as a number"
    ):
        suggest([], [])


def search(monkeypatch: pytest.MonkeyPatch, reason: Exception) -> int:
    """Return the number of rates that a range test tries whose step 20 fails on another rank for this reason."""
    monkeypatch.setattr(learning_rate_search, "preserved_state", lambda lm: nullcontext())
    monkeypatch.setattr(learning_rate_search, "open_steps", lambda batches: nullcontext(iter(range(60))))

    def try_step(number: Any, rate: float) -> float:
        if number == 20:
            raise OtherRankError("rank 1 failed") from reason
        return 3.0

    lm: Any = None
    batches: Any = None
    return len(find_learning_rate(lm, batches, try_step=try_step).rates)


def test_a_loss_that_is_not_finite_on_another_rank_ends_the_test_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, DivergenceError("the loss is nan")) == 20
    with pytest.raises(OtherRankError, match="rank 1 failed"):
        search(monkeypatch, TrainingError("out of memory"))
