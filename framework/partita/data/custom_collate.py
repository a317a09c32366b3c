"""What makes tensors of planned rows: padding on the right, or a class from outside (`data.collate`)."""

from pathlib import Path
from typing import Any

from partita.data.collate import Collate, collate
from partita.data.encoded import EncodedRows
from partita.data.parts import load_part, source_digest
from partita.data.planning.plan import PlannedBatch
from partita_schema.errors import DataError
from partita_trainers.base import Batch


def build_collate(target: str | None, *, folder: Path | None, pad_token_id: int) -> Collate:
    """What makes tensors: `data.collate`, made as `Class()` and called with (encoded, planned, pad_token_id).

    Raises ConfigError where there is no such class.
    """
    if target is None:
        return lambda encoded, planned: collate(encoded, planned, pad_token_id=pad_token_id)
    made = load_part(target, key="data.collate", folder=folder)()

    def custom(encoded: EncodedRows, planned: PlannedBatch) -> Batch:
        batch: Batch = made(encoded, planned, pad_token_id)
        check_batch(batch, wanted=tuple(encoded.keys.take(planned.rows)), target=target)
        return batch

    return custom


def collate_parts(target: str | None, *, folder: Path | None) -> dict[str, str]:
    """What decides the tensors, where it is a class of the user's, by a name that a person knows."""
    if target is None:
        return {}
    return {"collate": f"{target} {source_digest(load_part(target, key='data.collate', folder=folder))}"}


def check_batch(batch: Any, *, wanted: tuple[str, ...], target: str) -> None:
    """Raises DataError where a class of the user's gave something else than the rows that were asked for."""
    if not isinstance(batch, Batch):
        raise DataError(f"data.collate: {target} gave a {type(batch).__name__}; give a partita_trainers.base.Batch")
    if batch.keys != wanted:
        raise DataError(
            f"data.collate: {target} gave {batch.rows} rows for {len(wanted)}, or others; give the same keys"
        )
    shapes = tuple(batch.input_ids_BT.shape), tuple(batch.labels_BT.shape)
    if shapes[0] != shapes[1]:
        raise DataError(f"data.collate: {target} gave ids of shape {shapes[0]} and labels of shape {shapes[1]}")
