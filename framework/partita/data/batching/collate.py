"""Build tensors from planned rows, for training and evaluation; or with a user's class (`data.collate`).

B sequences in a batch, T tokens in its longest sequence, n rows, K tokens in total. A sequence holds one row, padded on
the right, or several rows packed one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.data.batching.documents import isolated_documents
from partita.data.batching.plan import PlannedBatch, alone
from partita.data.formatting.row_tokenizer import IGNORED
from partita.data.tokenized import TokenizedDataset, take_rows
from partita.data.user_objects import errors_of, make_user_object, source_digest
from partita_schema.common.text import counted
from partita_schema.errors import DataError
from partita_trainers.base import Batch
from partita_trainers.user_modules import load_class

Collate = Callable[[TokenizedDataset, PlannedBatch], Batch]
"""Builds the tensors of a planned batch."""


def collate(encoded: TokenizedDataset, planned: PlannedBatch, *, pad_token_id: int, two_sided: bool = False) -> Batch:
    """Return the planned rows as a batch. Without rows, B = 0 and T = 0.

    A row's first token is never in the loss: nothing precedes it, or, in a packed sequence, another row does. Position
    ids are set, and restart with each row, only if a sequence holds several rows, or several isolated documents, or if
    rows have branches, which all continue at the position after the prompt. With targets for a head, any token can be
    in the loss.

    Args:
        encoded: Tokenized rows.
        planned: Which of them are in the batch, and in which sequence.
        pad_token_id: Id that fills short rows.
        two_sided: Whether the rows are those of an encoder-decoder.
    """
    if encoded.isolated:
        encoded, planned = isolated_documents(encoded, planned)
    rows_n, sequences_n = planned.rows, planned.sequences
    starts_n = encoded.starts_Nplus1[rows_n]
    lengths_n = encoded.starts_Nplus1[rows_n + 1] - starts_n
    ends_n = np.cumsum(lengths_n)
    sequences = int(sequences_n[-1]) + 1 if len(sequences_n) else 0
    lengths_B = np.bincount(sequences_n, weights=lengths_n, minlength=sequences).astype(np.int64)
    shape = sequences, int(lengths_B.max(initial=0))
    before_sequence_B = np.cumsum(lengths_B) - lengths_B
    # Start of each row among the batch's cells, and position of each of the K tokens in its row.
    cells_n = sequences_n * shape[1] + ends_n - lengths_n - before_sequence_B[sequences_n]
    positions_K = np.arange(int(lengths_n.sum())) - np.repeat(ends_n - lengths_n, lengths_n)
    cells_K = np.repeat(cells_n, lengths_n) + positions_K
    ids_K = encoded.ids_L[np.repeat(starts_n, lengths_n) + positions_K]
    input_ids = np.full(shape[0] * shape[1], pad_token_id, dtype=np.int64)
    input_ids[cells_K] = ids_K
    labels = np.full(shape[0] * shape[1], IGNORED, dtype=np.int64)
    loss_cells_J = loss_cells(encoded, rows_n, cells_n)
    labels[loss_cells_J] = input_ids[loss_cells_J]
    targets = encoded.targets(rows_n)
    if targets is None:
        labels[cells_n] = IGNORED
    positions_BT = None
    if sequences < len(rows_n) or encoded.branched:
        positions = np.zeros(shape[0] * shape[1], dtype=np.int64)
        positions[cells_K] = positions_K
        if encoded.branched:
            restart_branches(positions, encoded, rows_n, cells_n)
        positions_BT = torch.from_numpy(positions.reshape(shape))
    return Batch(
        input_ids_BT=torch.from_numpy(input_ids.reshape(shape)),
        labels_BT=torch.from_numpy(labels.reshape(shape)),
        lengths_B=torch.from_numpy(lengths_B),
        keys=tuple(encoded.keys.take(rows_n)),
        position_ids_BT=positions_BT,
        targets_NK=None if targets is None else torch.from_numpy(targets),
        two_sided=two_sided,
        row_values_NK=None if encoded.row_values_NK is None else torch.from_numpy(encoded.row_values_NK[rows_n]),
    )


def restart_branches(positions: np.ndarray, encoded: TokenizedDataset, rows_n: np.ndarray, cells_n: np.ndarray) -> None:
    """Let all branches of a row continue at the position of its first one, in place.

    Args:
        positions: Position of the token in each cell of the batch.
        encoded: Tokenized rows.
        rows_n: The rows of the batch.
        cells_n: First cell of each.
    """
    for cell, row in zip(cells_n.tolist(), rows_n.tolist(), strict=True):
        (first, _), *others = encoded.loss_spans(row).tolist()
        for start, end in others:
            positions[cell + start : cell + end] -= start - first


def loss_cells(encoded: TokenizedDataset, rows_n: np.ndarray, cells_n: np.ndarray) -> np.ndarray:
    """Return the cells of the loss tokens of rows that start at `cells_n`, [loss tokens]."""
    spans_S2, span_starts_n1 = take_rows(encoded.loss_spans_S2.reshape(-1, 2), encoded.span_starts_Nplus1, rows_n)
    counts_S = spans_S2[:, 1].astype(np.int64) - spans_S2[:, 0]
    starts_S = np.repeat(cells_n, np.diff(span_starts_n1)) + spans_S2[:, 0]
    before_S = np.cumsum(counts_S) - counts_S
    cells: np.ndarray = np.repeat(starts_S - before_S, counts_S) + np.arange(int(counts_S.sum()))
    return cells


class EvaluationBatches:
    """Yield every row exactly once, the longest first, so that running out of memory happens at once."""

    def __init__(
        self,
        encoded: TokenizedDataset,
        *,
        batch_size: int,
        pad_token_id: int,
        two_sided: bool = False,
        indices: np.ndarray | None = None,
    ) -> None:
        """Batch rows for evaluation.

        Args:
            encoded: Tokenized rows.
            batch_size: Rows per batch.
            pad_token_id: Id that fills short rows.
            two_sided: Whether the rows are those of an encoder-decoder.
            indices: Indices of the rows; None for all.
        """
        self._encoded = encoded
        self._batch_size = batch_size
        self._collate = partial(collate, pad_token_id=pad_token_id, two_sided=two_sided)
        indices = np.arange(len(encoded)) if indices is None else indices
        self._rows = indices[np.argsort(-encoded.lengths[indices], kind="stable")]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self.numbered())

    def numbered(self) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the batches with the indices of their rows."""
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield rows, self._collate(self._encoded, alone(rows))


def evenly(length: int, wanted: int | None) -> np.ndarray:
    """Return evenly spaced indices, all of them if `wanted` is None or at least `length`."""
    if wanted is None or wanted >= length:
        return np.arange(length)
    return np.arange(wanted) * length // wanted


def build_collate(target: str | None, *, folder: Path | None, pad_token_id: int, two_sided: bool = False) -> Collate:
    """Return the collate function: `data.collate`, created as `Class()`, called with (encoded, planned, pad_token_id).

    Args:
        target: `module:Class`; None for the built-in collate function.
        folder: Folder of the configuration file, where the module may be.
        pad_token_id: Id that fills short rows.
        two_sided: Whether the rows are those of an encoder-decoder.

    Raises:
        ConfigError: If there is no such class, or it takes arguments.
        DataError: If it raises an exception.
    """
    if target is None:
        return partial(collate, pad_token_id=pad_token_id, two_sided=two_sided)
    collate_class = load_class(target, key="data.collate", folder=folder)
    collate_rows = make_user_object(collate_class, target, key="data.collate", signature="def __init__(self)")

    def custom(encoded: TokenizedDataset, planned: PlannedBatch) -> Batch:
        with errors_of(f"data.collate: {target}"):
            batch: Batch = collate_rows(encoded, planned, pad_token_id)
        check_batch(batch, wanted=tuple(encoded.keys.take(planned.rows)), sequences=planned.sequences, target=target)
        return replace(batch, two_sided=two_sided)

    return custom


def collate_inputs(target: str | None, *, folder: Path | None) -> dict[str, str]:
    """Return what decides the tensors by a readable name; empty for the built-in collate function."""
    if target is None:
        return {}
    return {"collate": f"{target} {source_digest(load_class(target, key='data.collate', folder=folder))}"}


def check_batch(batch: Any, *, wanted: tuple[str, ...], sequences: np.ndarray, target: str) -> None:
    """Check the batch of a user's class.

    Where sequences hold several rows, position ids mark the start of each row; its length is up to the user.

    Args:
        batch: The result of the user's class.
        wanted: Keys of the requested rows.
        sequences: Sequence of each row in the batch.
        target: `module:Class`, for messages.

    Raises:
        DataError: If the batch does not hold the requested rows in the requested sequences, or its shapes differ.
    """
    if not isinstance(batch, Batch):
        raise DataError(f"data.collate: {target} gave a {type(batch).__name__}; give a partita_trainers.Batch")
    if batch.keys != wanted:
        raise DataError(
            f"data.collate: {target} gave {counted(batch.rows, 'row')} for {len(wanted)}, or others; give the same keys"
        )
    shapes = tuple(batch.input_ids_BT.shape), tuple(batch.labels_BT.shape)
    if shapes[0] != shapes[1]:
        raise DataError(f"data.collate: {target} gave ids of shape {shapes[0]} and labels of shape {shapes[1]}")
    rows_B = np.bincount(sequences)
    if len(shapes[0]) != 2 or shapes[0][0] != len(rows_B):
        count = counted(len(rows_B), "sequence")
        raise DataError(
            f"data.collate: {target} gave ids of shape {shapes[0]} for {count}; put each row into its sequence in "
            "planned.sequences"
        )
    lengths = batch.lengths_B.tolist()
    if len(lengths) != len(rows_B) or any(not 0 <= length <= shapes[0][1] for length in lengths):
        raise DataError(
            f"data.collate: {target} gave lengths {lengths} for ids of shape {shapes[0]}; give the real tokens of each "
            "sequence"
        )
    check_positions(batch, rows_B=rows_B, target=target)


def check_positions(batch: Batch, *, rows_B: np.ndarray, target: str) -> None:
    """Raise DataError if position ids do not start the requested number of rows in each sequence."""
    positions_BT = batch.position_ids_BT
    if positions_BT is None:
        if len(rows_B) < batch.rows:
            count = counted(len(rows_B), "sequence")
            raise DataError(
                f"data.collate: {target} gave no position_ids_BT for {batch.rows} rows in {count}; give the position "
                "of each token in its row, 0 at the first"
            )
        return
    if positions_BT.shape != batch.input_ids_BT.shape:
        raise DataError(
            f"data.collate: {target} gave ids of shape {tuple(batch.input_ids_BT.shape)} and positions of shape "
            f"{tuple(positions_BT.shape)}"
        )
    real_BT = np.arange(positions_BT.shape[1]) < np.asarray(batch.lengths_B.tolist())[:, None]
    starts = ((positions_BT == 0).numpy() & real_BT).sum(1).tolist()
    if starts != rows_B.tolist():
        raise DataError(
            f"data.collate: {target} gave positions that begin {starts} rows in the sequences, for {rows_B.tolist()}; "
            "give a row position 0 at its first token alone"
        )
