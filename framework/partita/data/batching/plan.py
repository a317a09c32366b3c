"""Batches of row indices, before their tensors exist."""

from typing import NamedTuple

import numpy as np


class PlannedBatch(NamedTuple):
    """Rows of a batch, before its tensors exist."""

    rows: np.ndarray
    """Row indices, int64, [n]."""
    sequences: np.ndarray
    """Line of the batch that holds each row, ascending, int64, [n].

    Packed rows share a sequence; other rows have one sequence each: 0 to n-1.
    """


def alone(rows: np.ndarray) -> PlannedBatch:
    """Return a batch with one row per sequence."""
    return PlannedBatch(rows, np.arange(len(rows), dtype=np.int64))


NOTHING = alone(np.empty(0, dtype=np.int64))
"""A batch without rows; it fills the last step of an epoch."""
