"""Tests of choosing a learning rate from a loss curve."""

import pytest

from partita_schema.errors import TrainingError
from partita_trainers.learning_rate_search import suggest


def test_a_tenth_of_the_rate_with_the_lowest_loss_is_chosen() -> None:
    rates = [10 ** (-6 + number / 10) for number in range(60)]
    losses = [3.0 if rate < 1e-3 else 3.0 - 2.0 * (rate / 1e-2) if rate <= 1e-2 else 3.0 + rate * 50 for rate in rates]
    assert 5e-4 < suggest(rates, losses) < 3e-3


def test_no_finite_loss_is_an_error() -> None:
    with pytest.raises(
        TrainingError, match=r"the range test saw no finite loss; write trainer\.learning_rate as a number"
    ):
        suggest([], [])
