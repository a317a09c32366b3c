"""Intervals of metrics, and paired comparison of two models on the same rows.

Functions of the standard library and numpy: scipy, which no dependency needs, would take 140 MB and a second to import,
and replace only `mcnemar`. The tests compare with scipy and statsmodels.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

RESAMPLES = 2000
"""Bootstrap resamples."""
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959963984540054
"""Quantile of the standard normal distribution at (1 + CONFIDENCE) / 2."""


class Interval(NamedTuple):
    """An estimate with its 95 % confidence interval."""

    value: float
    """The estimate."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""


class Difference(NamedTuple):
    """The difference of a metric between two models on the same rows, with its confidence interval."""

    value: float
    """The model minus the reference."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    p: float
    """Two-sided p-value of no difference."""
    test: Literal["McNemar", "bootstrap"]
    """The test that the p-value is of: McNemar's exact test for right and wrong rows, else the bootstrap over rows."""


def has_interval(estimate: Interval | Difference) -> bool:
    """Return whether the interval of an estimate says something about other rows.

    One that is not known has no width, nor has one of resamples that all have the same value.
    """
    return estimate.low < estimate.high


def share_interval(right: int, rows: int) -> Interval:
    """Return a share with its score interval (Wilson 1927), which has a width also if all rows are right.

    Args:
        right: Rows that count.
        rows: All rows, at least one.
    """
    share, z2 = right / rows, NORMAL_QUANTILE**2
    center = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    width = NORMAL_QUANTILE * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows**2)) / (1 + z2 / rows)
    return Interval(share, max(0.0, min(share, center - width)), min(1.0, max(share, center + width)))


def percentiles(value: float, resampled_R: np.ndarray) -> Interval:
    """Return a value with the interval between the outer percentiles of its resamples."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled_R, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def right_difference(only_first: int, only_second: int, rows: int) -> Difference:
    """Return the difference in the share of right rows, with the interval of Agresti and Min (2005) for matched pairs.

    The interval is Wald's after half a row is added to each of the four combinations of right and wrong, so that it
    has a width also if the models agree on every row.

    Args:
        only_first: Rows that only the first model answers right.
        only_second: Rows that only the second model answers right.
        rows: All rows, at least one.
    """
    total, first, second = rows + 2, only_first + 0.5, only_second + 0.5
    center = (second - first) / total
    width = NORMAL_QUANTILE * math.sqrt(first + second - (second - first) ** 2 / total) / total
    value = (only_second - only_first) / rows
    low, high = max(-1.0, min(value, center - width)), min(1.0, max(value, center + width))
    return Difference(value, low, high, mcnemar(only_first, only_second), "McNemar")


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided exact p-value that two models are equally often right (McNemar 1947, binomial).

    Args:
        only_first: Rows that only the first model answers right.
        only_second: Rows that only the second model answers right.
    """
    n, k = only_first + only_second, min(only_first, only_second)
    term = math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
    tail = 0.0
    for i in range(k, -1, -1):  # each term follows from the one above it, and only about sqrt(n) of them count
        tail += term
        term *= i / (n - i + 1)
        if term <= tail * 1e-17:
            break
    return min(1.0, 2 * tail)
