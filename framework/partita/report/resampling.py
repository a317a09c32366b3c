"""Metrics of rows with bootstrap intervals, alone and as paired differences of two models.

A metric is a function of sums over rows. Rows are resampled in random blocks: with as many rows as blocks or fewer,
each block is a row, and this is the bootstrap of rows (Efron 1979). With more rows, a sum over resampled blocks has the
same variance as one over resampled rows, and the cost does not depend on the number of rows.
"""

from functools import lru_cache

import numpy as np

from partita.report.statistics import RESAMPLES, Difference, Interval, percentiles

MAX_BLOCKS = 500


class Blocks:
    """Rows in random blocks, and numbers of times that each block is drawn. N rows, B blocks, R resamples.

    Two objects for the same number of rows draw the same rows, so that two models are compared on the same resamples.
    """

    def __init__(self, rows: int, *, seed: int = 0) -> None:
        """Assign `rows` rows to blocks."""
        self.rows = rows
        self.seed = seed
        self.count = min(rows, MAX_BLOCKS)
        self.blocks_N = np.random.default_rng(seed).permutation(rows) % self.count

    @property
    def draws_RB(self) -> np.ndarray:
        """Numbers of times that each block is drawn; in the first row, each is drawn once."""
        return drawn(self.count, self.seed)

    def sums(self, *values_N: np.ndarray) -> np.ndarray:
        """Return the sums of values over the rows of each resample, [R + 1, values]; the first is over all rows."""
        sums_B = [np.bincount(self.blocks_N, weights=values, minlength=self.count) for values in values_N]
        return np.asarray(self.draws_RB @ np.stack(sums_B, axis=1))

    def sizes(self) -> np.ndarray:
        """Return the number of rows of each resample, [R + 1]; it differs where blocks differ in their rows."""
        return np.asarray(self.draws_RB @ np.bincount(self.blocks_N, minlength=self.count))

    def means(self, values_N: np.ndarray) -> np.ndarray:
        """Return the mean of a value over the rows of each resample, [R + 1]."""
        return np.asarray(self.sums(values_N)[:, 0] / self.sizes())

    def counts(self, rows_M: np.ndarray, codes_M: np.ndarray, num_codes: int) -> np.ndarray:
        """Return how often each code occurs in each resample, [R + 1, codes]; the first is over all rows.

        Args:
            rows_M: The row of each occurrence.
            codes_M: Its code, from 0.
            num_codes: Number of codes.
        """
        places_M = self.blocks_N[rows_M] * num_codes + codes_M
        counts_BC = np.bincount(places_M, minlength=self.count * num_codes).reshape(self.count, num_codes)
        return np.asarray(self.draws_RB @ counts_BC)


@lru_cache(maxsize=4)
def drawn(blocks: int, seed: int) -> np.ndarray:
    """Return how often each block is drawn in each resample, [R + 1, B], float64; in the first row, once."""
    places_RB = np.random.default_rng([seed, 1]).integers(0, blocks, (RESAMPLES, blocks))
    places_RB += blocks * np.arange(RESAMPLES)[:, None]  # counting them is ten times as fast as a multinomial draw
    drawn_RB = np.bincount(places_RB.ravel(), minlength=RESAMPLES * blocks).reshape(RESAMPLES, blocks)
    return np.vstack([np.ones((1, blocks)), drawn_RB])


Estimates = dict[str, np.ndarray]
"""By metric: its value over all rows, then over each resample, [R + 1]."""


def ratio(numerator_R: np.ndarray, denominator_R: np.ndarray) -> np.ndarray:
    """Return a quotient; NaN where there is nothing to divide by."""
    quotient_R = np.full_like(numerator_R, np.nan, dtype=np.float64)
    np.divide(numerator_R, denominator_R, out=quotient_R, where=denominator_R != 0)
    return quotient_R


def interval_of(estimate_R: np.ndarray) -> Interval:
    """Return a metric with its interval; both ends are the value if no resample has one."""
    value, resampled_R = float(estimate_R[0]), estimate_R[1:]
    finite_R = resampled_R[np.isfinite(resampled_R)]
    return percentiles(value, finite_R) if len(finite_R) else Interval(value, value, value)


def difference_of(base_R: np.ndarray, result_R: np.ndarray, *, units: int) -> Difference:
    """Return the result minus the base, resampled on the same rows.

    Args:
        base_R: A metric of the base over all rows, then over each resample.
        result_R: The same of the result.
        units: Number of rows, or queries, that were resampled.
    """
    with np.errstate(invalid="ignore"):
        difference_R = result_R - base_R
    return Difference(*interval_of(difference_R), p=two_sided_p(difference_R[1:], units=units), test="bootstrap")


def two_sided_p(resampled_R: np.ndarray, *, units: int) -> float:
    """Return the two-sided p-value of 0 among resampled differences; never 0, because resamples are few.

    Nor is it smaller than that of a sign test in which all units agree: resamples of one row are all equal.

    Args:
        resampled_R: The differences.
        units: Number of rows, or queries, that were resampled.
    """
    finite_R = resampled_R[np.isfinite(resampled_R)]
    below, above = int((finite_R <= 0).sum()), int((finite_R >= 0).sum())
    return min(1.0, max(2 * (min(below, above) + 1) / (len(finite_R) + 1), 2.0 ** (1 - units)))
