"""The rows of several requests as one dataset, so that they share batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.generation.prompts import PromptRows


class JoinedRows:
    """Rows one after the other; implements `PromptRows`."""

    def __init__(self, requests: Sequence[PromptRows]) -> None:
        """Join the rows of `requests`."""
        self._requests = requests
        self._ends = np.cumsum([len(rows) for rows in requests])
        self.columns = tuple(dict.fromkeys(column for rows in requests for column in rows.columns))
        """Column names."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def parts(self) -> list[range]:
        """Return the indices of the rows of each request."""
        starts = [0, *self._ends[:-1].tolist()]
        return [range(start, end) for start, end in zip(starts, self._ends.tolist(), strict=True)]

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows in the requested order."""
        found = (self._find(index) for index in indices)
        return [rows.get([index])[0] for rows, index in found]

    def key(self, index: int) -> str:
        """Return the name of a row."""
        rows, number = self._find(index)
        return rows.key(number)

    def sampling_key(self, index: int) -> str:
        """Return the key from which a row's random numbers are derived."""
        rows, number = self._find(index)
        return rows.sampling_key(number)

    def _find(self, index: int) -> tuple[PromptRows, int]:
        """Return the request of a row, and the row's index in it."""
        request = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[request - 1]) if request else 0
        return self._requests[request], index - start
