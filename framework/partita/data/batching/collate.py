"""Build tensors from planned rows.

B lines in a batch, T tokens in its longest line, n rows, K tokens in total. A line holds one row, padded on the right,
or several rows packed one after the other.
"""

from collections.abc import Callable

import numpy as np
import torch

from partita.data.batching.plan import PlannedBatch
from partita.data.formatting.row_tokenizer import IGNORED
from partita.data.tokenized import TokenizedDataset
from partita_trainers.base import Batch

Collate = Callable[[TokenizedDataset, PlannedBatch], Batch]
"""Builds the tensors of a planned batch."""


def collate(encoded: TokenizedDataset, planned: PlannedBatch, *, pad_token_id: int) -> Batch:
    """Return the planned rows as a batch. Without rows, B = 0 and T = 0.

    A row's first token is never in the loss: nothing precedes it, or, in a packed line, another row does. Position ids
    are set, and restart with each row, only if a line holds several rows.
    """
    rows_n, lines_n = planned.rows, planned.lines
    starts_n = encoded.starts_N1[rows_n]
    lengths_n = encoded.starts_N1[rows_n + 1] - starts_n
    ends_n = np.cumsum(lengths_n)
    lines = int(lines_n[-1]) + 1 if len(lines_n) else 0
    lengths_B = np.bincount(lines_n, weights=lengths_n, minlength=lines).astype(np.int64)
    shape = lines, int(lengths_B.max(initial=0))
    before_line_B = np.cumsum(lengths_B) - lengths_B
    # Start of each row among the batch's cells, and position of each of the K tokens in its row.
    cells_n = lines_n * shape[1] + ends_n - lengths_n - before_line_B[lines_n]
    places_K = np.arange(int(lengths_n.sum())) - np.repeat(ends_n - lengths_n, lengths_n)
    cells_K = np.repeat(cells_n, lengths_n) + places_K
    ids_K = encoded.ids_L[np.repeat(starts_n, lengths_n) + places_K]
    input_ids = np.full(shape[0] * shape[1], pad_token_id, dtype=np.int64)
    input_ids[cells_K] = ids_K
    labels = np.full(shape[0] * shape[1], IGNORED, dtype=np.int64)
    for cell, row in zip(cells_n.tolist(), rows_n.tolist(), strict=True):
        for start, end in encoded.loss_spans(row).tolist():
            labels[cell + start : cell + end] = input_ids[cell + start : cell + end]
    labels[cells_n] = IGNORED
    positions_BT = None
    if lines < len(rows_n):
        positions = np.zeros(shape[0] * shape[1], dtype=np.int64)
        positions[cells_K] = places_K
        positions_BT = torch.from_numpy(positions.reshape(shape))
    return Batch(
        input_ids_BT=torch.from_numpy(input_ids.reshape(shape)),
        labels_BT=torch.from_numpy(labels.reshape(shape)),
        lengths_B=torch.from_numpy(lengths_B),
        keys=tuple(encoded.keys.take(rows_n)),
        position_ids_BT=positions_BT,
    )
