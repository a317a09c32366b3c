"""Intervals and p-values of resampled metrics are near those of scipy's bootstrap over rows."""

import numpy as np
import pytest
from scipy.stats import bootstrap
from sklearn.metrics import f1_score

from partita.report.resampling import MAX_BLOCKS, Blocks, difference_of, interval_of, ratio, two_sided_p
from partita.report.statistics import Interval


def losses_of(rows: int, *, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sums of losses of rows of two models, and their numbers of tokens."""
    rng = np.random.default_rng(seed)
    tokens_N = rng.integers(1, 20, rows).astype(np.float64)
    first_N = rng.exponential(size=rows) * tokens_N
    return first_N, first_N * rng.uniform(0.7, 1.2, rows), tokens_N


def mean_of(blocks: Blocks, sums_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    sums_R2 = blocks.sums(sums_N, tokens_N)
    return ratio(sums_R2[:, 0], sums_R2[:, 1])


@pytest.mark.parametrize("rows", [300, MAX_BLOCKS + 500])
def test_a_paired_difference_is_near_that_of_scipys_bootstrap(rows: int) -> None:
    first_N, second_N, tokens_N = losses_of(rows)

    def statistic(a: np.ndarray, b: np.ndarray, n: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.asarray((b.sum(axis=axis) - a.sum(axis=axis)) / n.sum(axis=axis))

    columns = (first_N, second_N, tokens_N)
    expected = bootstrap(
        columns, statistic, paired=True, method="percentile", n_resamples=2000, rng=0, batch=200
    ).confidence_interval
    blocks = Blocks(rows)
    difference = difference_of(
        mean_of(blocks, first_N, tokens_N), mean_of(blocks, second_N, tokens_N), units=blocks.rows
    )
    assert difference.value == pytest.approx(statistic(*columns))
    assert difference[1:3] == pytest.approx(expected, abs=0.1 * (expected.high - expected.low))
    assert difference.p < 0.01


def test_macro_f1_is_near_scipys_bootstrap_over_rows() -> None:
    table = np.array([[40, 5, 2], [8, 30, 4], [0, 6, 25]])
    truths_N, answers_N = (np.repeat(indices, table.ravel()) for indices in np.indices(table.shape).reshape(2, -1))

    def statistic(truths: np.ndarray, answers: np.ndarray) -> float:
        return float(f1_score(truths, answers, average="macro"))

    expected = bootstrap(
        (truths_N, answers_N), statistic, paired=True, vectorized=False, method="percentile", n_resamples=300, rng=0
    ).confidence_interval
    blocks, rows_N, shared_N = Blocks(120), np.arange(120), truths_N == answers_N
    counts = [blocks.counts(rows_N, codes_N, 3) for codes_N in (truths_N, answers_N)]
    shared = blocks.counts(rows_N[shared_N], truths_N[shared_N], 3)
    interval = interval_of((2 * shared / (counts[0] + counts[1])).mean(axis=1))
    assert interval.value == pytest.approx(statistic(truths_N, answers_N))
    assert interval[1:] == pytest.approx(expected, abs=0.15 * (expected.high - expected.low))


@pytest.mark.parametrize("rows", [50, MAX_BLOCKS + 1])
def test_equal_models_do_not_differ(rows: int) -> None:
    first_N, _, tokens_N = losses_of(rows)
    mean_R = mean_of(Blocks(rows), first_N, tokens_N)
    assert difference_of(mean_R, mean_R, units=50) == (0.0, 0.0, 0.0, 1.0, "bootstrap")


def test_the_p_value_is_the_share_of_resamples_on_the_other_side() -> None:
    assert two_sided_p(np.array([1.0] * 96 + [-1.0] * 3), units=100) == pytest.approx(2 * 4 / 100)
    assert two_sided_p(np.array([1.0] * 99), units=100) == pytest.approx(2 / 100)
    assert two_sided_p(np.array([1.0, np.nan, -1.0]), units=100) == 1.0
    assert two_sided_p(-np.array([1.0] * 96 + [-1.0] * 3), units=100) == pytest.approx(2 * 4 / 100)


def test_a_few_rows_give_no_small_p_value() -> None:
    for rows, least in ((1, 1.0), (2, 0.5), (3, 0.25), (9, 2**-8)):
        assert two_sided_p(np.ones(9999), units=rows) == least


def test_a_metric_without_a_resample_that_has_it_has_no_width() -> None:
    assert interval_of(np.array([0.5, np.nan, np.nan])) == Interval(0.5, 0.5, 0.5)


@pytest.mark.long
def test_paired_differences_are_significant_in_one_of_twenty_cases_without_a_difference() -> None:
    found = 0
    for seed in range(400):
        first_N, second_N = np.random.default_rng(seed).exponential(size=(2, 60))
        blocks, ones_N = Blocks(60, seed=seed), np.ones(60)
        found += (
            difference_of(mean_of(blocks, first_N, ones_N), mean_of(blocks, second_N, ones_N), units=blocks.rows).p
            < 0.05
        )
    assert 8 <= found <= 40  # 20 expected; the percentile interval is a little short for 60 rows
