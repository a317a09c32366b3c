"""Tokens of prompts that are kept in memory, up to a maximum number."""

import numpy as np
import numpy.typing as npt


class HeldTokens:
    """Tokens of rows, up to a maximum number."""

    def __init__(self, rows: int, *, most: int) -> None:
        """Reserve room for `most` tokens; each row is added once."""
        self._most, self._used = most, 0
        self._tokens = np.zeros(0, dtype=np.int32)
        self._ends = np.zeros((rows, 2), dtype=np.int32)

    def __contains__(self, row: int) -> bool:
        return bool(self._ends[row, 1])

    def __getitem__(self, row: int) -> list[int]:
        start, end = self._ends[row]
        ids: list[int] = self._tokens[start:end].tolist()
        return ids

    def record(self, rows: slice) -> "tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]":
        """Return all tokens, and the start and end of those of a part of the rows."""
        return self._tokens[: self._used], self._ends[rows]

    def take_in(self, rows: slice, tokens: "npt.NDArray[np.int32]", ends: "npt.NDArray[np.int32]") -> None:
        """Add what `record` returned for these rows."""
        self._tokens = np.concatenate([self._tokens[: self._used], tokens])
        self._ends[rows] = np.where(ends[:, 1:] > 0, ends + self._used, 0)
        self._used = len(self._tokens)

    def add(self, row: int, ids: npt.NDArray[np.integer]) -> bool:
        """Add a row's tokens, at least one, if there is room; return whether there was."""
        end = self._used + len(ids)
        if end > self._most:
            return False
        if end > len(self._tokens):
            grown = np.zeros(min(self._most, max(2 * end, 4096)), dtype=np.int32)
            grown[: self._used] = self._tokens[: self._used]
            self._tokens = grown
        self._tokens[self._used : end] = ids
        self._ends[row] = self._used, end
        self._used = end
        return True
