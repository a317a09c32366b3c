"""Intervals and p-values equal those of scipy and statsmodels, or cover the true value as often as they promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, multinomial
from statsmodels.stats import contingency_tables
from statsmodels.stats.proportion import proportion_confint

from partita.report.statistics import (
    mcnemar,
    right_difference,
    share_interval,
)

counts = st.integers(0, 400)


@given(counts, counts)
def test_mcnemar_equals_the_binomial_test_of_scipy(only_first: int, only_second: int) -> None:
    n = only_first + only_second
    expected = binomtest(only_first, n).pvalue if n else 1.0
    assert mcnemar(only_first, only_second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(only_first, only_second) == mcnemar(only_second, only_first)


@pytest.mark.parametrize("pair", [(0, 0), (0, 1), (3, 12), (10, 10), (40, 75)], ids=str)
def test_mcnemar_equals_that_of_statsmodels(pair: tuple[int, int]) -> None:
    table = [[100, pair[0]], [pair[1], 50]]
    expected = contingency_tables.mcnemar(table, exact=True).pvalue if sum(pair) else 1.0
    assert mcnemar(*pair) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("only_first", [0, 20_000, 24_600, 25_000, 49_999])
def test_mcnemar_of_many_rows_equals_that_of_scipy(only_first: int) -> None:
    expected = binomtest(only_first, 50_000).pvalue
    assert mcnemar(only_first, 50_000 - only_first) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@given(st.integers(1, 3000).flatmap(lambda rows: st.tuples(st.integers(0, rows), st.just(rows))))
def test_the_interval_of_a_share_equals_wilsons_of_statsmodels(case: tuple[int, int]) -> None:
    interval = share_interval(*case)
    assert interval[1:] == pytest.approx(proportion_confint(*case, method="wilson"), abs=1e-12)


def coverage(rows: int, only_first: float, only_second: float) -> float:
    """Return the exact probability that the interval of the difference covers the true one."""
    covered = 0.0
    for first in range(rows + 1):
        for second in range(rows + 1 - first):
            difference = right_difference(first, second, rows)
            if difference.low <= only_second - only_first <= difference.high:
                shares = [only_first, only_second, 1 - only_first - only_second]
                covered += multinomial.pmf([first, second, rows - first - second], rows, shares)
    return covered


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.05, 0.2), (0.02, 0.02), (0.3, 0.4)], ids=str)
def test_the_interval_of_right_rows_covers_the_truth_at_least_94_percent_of_the_time(
    shares: tuple[float, float],
) -> None:
    assert coverage(30, *shares) >= 0.94


@given(counts, counts, st.integers(0, 400))
def test_the_interval_of_right_rows_holds_the_difference_and_turns_with_the_order(
    first: int, second: int, same: int
) -> None:
    rows = max(1, first + second + same)
    forward, backward = right_difference(first, second, rows), right_difference(second, first, rows)
    assert -1 <= forward.low <= forward.value <= forward.high <= 1
    assert forward[:3] == pytest.approx((-backward.value, -backward.high, -backward.low))
    assert forward.high > forward.low
    assert forward.p == mcnemar(first, second)
