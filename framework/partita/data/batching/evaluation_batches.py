"""Evaluation batches: every row exactly once, without repeating rows to fill up."""

from collections.abc import Iterator

import numpy as np

from partita.data.batching.collate import collate
from partita.data.batching.plan import alone
from partita.data.tokenized import TokenizedDataset
from partita_trainers.base import Batch


class EvaluationBatches:
    """Yield every row exactly once, the longest first, so that running out of memory happens at once."""

    def __init__(
        self, encoded: TokenizedDataset, *, batch_size: int, pad_token_id: int, places: np.ndarray | None = None
    ) -> None:
        """Batch rows for evaluation.

        Args:
            encoded: Tokenized rows.
            batch_size: Rows per batch.
            pad_token_id: Id that fills short rows.
            places: Indices of the rows; None for all.
        """
        self._encoded = encoded
        self._batch_size = batch_size
        self._pad_token_id = pad_token_id
        places = np.arange(len(encoded)) if places is None else places
        self._rows = places[np.argsort(-encoded.lengths[places], kind="stable")]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield collate(self._encoded, alone(rows), pad_token_id=self._pad_token_id)


def evenly(length: int, wanted: int | None) -> np.ndarray:
    """Return evenly spaced indices, all of them if `wanted` is None or at least `length`."""
    if wanted is None or wanted >= length:
        return np.arange(length)
    return np.arange(wanted) * length // wanted
