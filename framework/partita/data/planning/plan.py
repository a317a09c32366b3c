"""What a plan is made of: batches of row numbers, and where the plan stands behind each step."""

from typing import NamedTuple

import numpy as np


class PlannedBatch(NamedTuple):
    """Rows of a batch, before their tensors exist."""

    rows: np.ndarray
    """Row numbers, int64, [n]."""
    lines: np.ndarray
    """Line of the batch in which each row stands, ascending, int64, [n]. Packed rows share a line; others have a line
    each: 0 to n-1."""


def alone(rows: np.ndarray) -> PlannedBatch:
    """A batch in which every row has a line of its own."""
    return PlannedBatch(rows, np.arange(len(rows), dtype=np.int64))


NOTHING = alone(np.empty(0, dtype=np.int64))
"""A batch without rows: it fills the last step of an epoch."""
