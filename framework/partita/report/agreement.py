"""Which rows two models have right."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Agreement:
    """Number of rows that two runs have right."""

    output: str
    """Name of the output."""
    both: int
    """Rows that both runs have right."""
    only_first: int
    """Rows that only the reference run has right."""
    only_second: int
    """Rows that only the other run has right."""
    neither: int
    """Rows that no run has right."""


def agreement_of(output: str, first_N: np.ndarray, second_N: np.ndarray) -> Agreement | None:
    """Return how many rows both runs, only the first, only the second, and neither has right.

    None if rows are neither right nor wrong.

    Args:
        output: Name of the output.
        first_N: Whether the reference run has each row right; NaN where that is not judged.
        second_N: The same of the other run.
    """
    if not np.isfinite(first_N).all() or not np.isfinite(second_N).all():
        return None
    first_N, second_N = first_N > 0, second_N > 0
    groups = (first_N & second_N, first_N & ~second_N, ~first_N & second_N, ~first_N & ~second_N)
    return Agreement(output, *(int(group.sum()) for group in groups))
