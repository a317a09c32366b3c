"""All rows of a source, readable or not, in their order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from partita.data.rows import BadRow
from partita.generation.prompts import PromptRows


class AllRows:
    """Readable and unreadable rows by their index in the source. An unreadable row has no values."""

    def __init__(self, rows: PromptRows, bad: Sequence[BadRow]) -> None:
        """Combine the readable rows with the unreadable ones, `bad`, which are in the order of the source."""
        self._rows = rows
        self.columns = rows.columns
        """Column names."""
        self._bad = {min(row.num_before, len(rows)) + number: row for number, row in enumerate(bad)}
        self.unreadable = {index: row.reason for index, row in self._bad.items()}
        """Why a row could not be read, by its index."""
        self._length = len(rows) + len(bad)
        self._bad_indices = np.array(list(self._bad), dtype=np.int64)

    def __len__(self) -> int:
        return self._length

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows in the requested order."""
        if not self._bad:
            return self._rows.get(indices)
        readable = [self._readable_index(index) for index in indices if index not in self._bad]
        rows = iter(self._rows.get(readable) if readable else [])
        return [{} if index in self._bad else next(rows) for index in indices]

    def key(self, index: int) -> str:
        """Return the name of a row, the same in every run."""
        bad = self._bad.get(index)
        return self._rows.key(self._readable_index(index)) if bad is None else bad.key

    def sampling_key(self, index: int) -> str:
        """Return the key from which a row's random numbers are derived."""
        bad = self._bad.get(index)
        return self._rows.sampling_key(self._readable_index(index)) if bad is None else bad.key

    def _readable_index(self, index: int) -> int:
        """Return the index of a readable row among the readable ones."""
        return index - int(np.searchsorted(self._bad_indices, index))
