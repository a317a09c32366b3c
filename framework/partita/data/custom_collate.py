"""What makes tensors of planned rows: padding on the right, or a class from outside (`data.collate`)."""

from pathlib import Path
from typing import Any

import numpy as np

from partita.data.collate import Collate, collate
from partita.data.parts import load_part, source_digest
from partita.data.planning.plan import PlannedBatch
from partita.data.tokenized import TokenizedDataset
from partita_schema.counted import counted
from partita_schema.errors import DataError
from partita_trainers.base import Batch


def build_collate(target: str | None, *, folder: Path | None, pad_token_id: int) -> Collate:
    """What makes tensors: `data.collate`, made as `Class()` and called with (encoded, planned, pad_token_id).

    Raises ConfigError where there is no such class.
    """
    if target is None:
        return lambda encoded, planned: collate(encoded, planned, pad_token_id=pad_token_id)
    made = load_part(target, key="data.collate", folder=folder)()

    def custom(encoded: TokenizedDataset, planned: PlannedBatch) -> Batch:
        batch: Batch = made(encoded, planned, pad_token_id)
        check_batch(batch, wanted=tuple(encoded.keys.take(planned.rows)), lines=planned.lines, target=target)
        return batch

    return custom


def collate_parts(target: str | None, *, folder: Path | None) -> dict[str, str]:
    """What decides the tensors, where it is a class of the user's, by a name that a person knows."""
    if target is None:
        return {}
    return {"collate": f"{target} {source_digest(load_part(target, key='data.collate', folder=folder))}"}


def check_batch(batch: Any, *, wanted: tuple[str, ...], lines: np.ndarray, target: str) -> None:
    """Raises DataError where a class of the user's gave something else than the rows that were asked for, in `lines`.

    Where lines hold several rows, positions say where each row begins: how many tokens it has is the user's.
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
        found = counted(len(rows_B), "line")
        raise DataError(
            f"data.collate: {target} gave ids of shape {shapes[0]} for {found}; put each row into the line that "
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
    """Raises DataError where positions do not begin as many rows in each line as were asked for."""
    positions_BT = batch.position_ids_BT
    if positions_BT is None:
        if len(rows_B) < batch.rows:
            found = counted(len(rows_B), "line")
            raise DataError(
                f"data.collate: {target} gave no position_ids_BT for {batch.rows} rows in {found}; give the place of "
                "each token in its row, 0 at the first"
            )
        return
    if positions_BT.shape != batch.input_ids_BT.shape:
        raise DataError(
            f"data.collate: {target} gave ids of shape {tuple(batch.input_ids_BT.shape)} and positions of shape "
            f"{tuple(positions_BT.shape)}"
        )
    real_BT = np.arange(positions_BT.shape[1]) < np.asarray(batch.lengths_B.tolist())[:, None]
    found = ((positions_BT == 0).numpy() & real_BT).sum(1).tolist()
    if found != rows_B.tolist():
        raise DataError(
            f"data.collate: {target} gave positions that begin {found} rows in the lines, for {rows_B.tolist()}; give "
            "a row position 0 at its first token alone"
        )
