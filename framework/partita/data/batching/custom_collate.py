"""The collate function of a run: right padding, or a user's class (`data.collate`)."""

from pathlib import Path
from typing import Any

import numpy as np

from partita.data.batching.collate import Collate, collate
from partita.data.batching.plan import PlannedBatch
from partita.data.parts import load_part, source_digest
from partita.data.tokenized import TokenizedDataset
from partita_schema.counted import counted
from partita_schema.errors import DataError
from partita_trainers.base import Batch


def build_collate(target: str | None, *, folder: Path | None, pad_token_id: int) -> Collate:
    """Return the collate function: `data.collate`, created as `Class()`, called with (encoded, planned, pad_token_id).

    Args:
        target: `module:Class`; None for the built-in collate function.
        folder: Folder of the configuration file, where the module may be.
        pad_token_id: Id that fills short rows.

    Raises:
        ConfigError: If there is no such class.
    """
    if target is None:
        return lambda encoded, planned: collate(encoded, planned, pad_token_id=pad_token_id)
    collate_rows = load_part(target, key="data.collate", folder=folder)()

    def custom(encoded: TokenizedDataset, planned: PlannedBatch) -> Batch:
        batch: Batch = collate_rows(encoded, planned, pad_token_id)
        check_batch(batch, wanted=tuple(encoded.keys.take(planned.rows)), lines=planned.lines, target=target)
        return batch

    return custom


def collate_parts(target: str | None, *, folder: Path | None) -> dict[str, str]:
    """Return what decides the tensors by a readable name; empty for the built-in collate function."""
    if target is None:
        return {}
    return {"collate": f"{target} {source_digest(load_part(target, key='data.collate', folder=folder))}"}


def check_batch(batch: Any, *, wanted: tuple[str, ...], lines: np.ndarray, target: str) -> None:
    """Check the batch of a user's class.

    Where lines hold several rows, position ids mark the start of each row; its length is up to the user.

    Args:
        batch: The result of the user's class.
        wanted: Keys of the requested rows.
        lines: Line of each row in the batch.
        target: `module:Class`, for messages.

    Raises:
        DataError: If the batch does not hold the requested rows in the requested lines, or its shapes differ.
    """
    if not isinstance(batch, Batch):
        raise DataError(f"data.collate: {target} gave a {type(batch).__name__}; give a partita_trainers.base.Batch")
    if batch.keys != wanted:
        raise DataError(
            f"data.collate: {target} gave {counted(batch.rows, 'row')} for {len(wanted)}, or others; give the same keys"
        )
    shapes = tuple(batch.input_ids_BT.shape), tuple(batch.labels_BT.shape)
    if shapes[0] != shapes[1]:
        raise DataError(f"data.collate: {target} gave ids of shape {shapes[0]} and labels of shape {shapes[1]}")
    rows_B = np.bincount(lines)
    if len(shapes[0]) != 2 or shapes[0][0] != len(rows_B):
        count = counted(len(rows_B), "line")
        raise DataError(
            f"data.collate: {target} gave ids of shape {shapes[0]} for {count}; put each row into the line that "
            "planned.lines says"
        )
    lengths = batch.lengths_B.tolist()
    if len(lengths) != len(rows_B) or any(not 0 <= length <= shapes[0][1] for length in lengths):
        raise DataError(
            f"data.collate: {target} gave lengths {lengths} for ids of shape {shapes[0]}; give the real tokens of each "
            "line"
        )
    check_positions(batch, rows_B=rows_B, target=target)


def check_positions(batch: Batch, *, rows_B: np.ndarray, target: str) -> None:
    """Raise DataError if position ids do not start the requested number of rows in each line."""
    positions_BT = batch.position_ids_BT
    if positions_BT is None:
        if len(rows_B) < batch.rows:
            count = counted(len(rows_B), "line")
            raise DataError(
                f"data.collate: {target} gave no position_ids_BT for {batch.rows} rows in {count}; give the place of "
                "each token in its row, 0 at the first"
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
            f"data.collate: {target} gave positions that begin {starts} rows in the lines, for {rows_B.tolist()}; give "
            "a row position 0 at its first token alone"
        )
