"""Split micro-batches into smaller ones when memory runs out.

Shapes: B sequences of a batch, T tokens of its longest sequence. A sequence is a row, or several where rows are packed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from partita_schema.common.text import counted
from partita_schema.errors import TrainingError
from partita_trainers.base import Batch

logger = logging.getLogger(__name__)


@dataclass
class MicroBatchSplitter:
    """Splits micro-batches that do not fit in memory."""

    parts: int = 1
    """Parts of a micro-batch: 1, 2, 4 and so on."""
    events: list[dict[str, int]] = field(default_factory=list)
    """Out-of-memory events: the step, the rows and tokens of the micro-batch, and the rows that were tried next.

    If rows are packed, sequences count as rows.
    """

    def split(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the parts that have loss tokens, in order."""
        parts = [part for batch in batches for part in split_batch(batch, self.parts)]
        return [part for part in parts if part.loss_tokens]

    def halve(self, failed: Batch, *, number: int, failure: Exception) -> None:
        """Double the number of parts from here on. Raises TrainingError if the part that failed is a single row."""
        rows, tokens = failed.input_ids_BT.shape
        if failed.rows == 1:
            raise TrainingError(
                f"step {number}: out of memory with 1 row of {counted(tokens, 'token')}; lower "
                "preprocessing.global_max_sequence_length, write trainer.gradient_checkpointing: true or "
                "quantization: {bits: 4}, or take a smaller base_model"
            ) from failure
        self.parts *= 2
        now = -(-rows // 2)
        self.events.append({"step": number, "rows": rows, "tokens": tokens, "now": now})
        if failed.rows == rows:
            message = "step %d: out of memory with %s of %d tokens; retrying with %d rows at a time"
            logger.warning(message, number, counted(rows, "row"), tokens, now)
        else:
            message = "step %d: out of memory with %s (%d x %d tokens); retrying with half"
            logger.warning(message, number, counted(failed.rows, "packed row"), rows, tokens)
        logger.debug("device error: %s", failure)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON for a checkpoint."""
        return {"parts": self.parts, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.parts, self.events = state["parts"], list(state["events"])


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split the rows in order into `parts` batches, or one per row if there are fewer.

    Each batch is as wide as its longest sequence.

    Sequences of packed rows stay whole while there are enough of them; otherwise each is split between its rows.
    """
    if parts == 1 or batch.rows <= 1:
        return [batch]
    groups = torch.arange(batch.sequences).tensor_split(min(parts, batch.sequences))
    selected = [select_sequences(batch, int(group[0]), int(group[-1]) + 1) for group in groups]
    if parts <= batch.sequences or batch.position_ids_BT is None:
        return selected
    return [part for sequence in selected for part in split_packed_sequence(sequence, -(-parts // batch.sequences))]


def select_sequences(batch: Batch, start: int, end: int) -> Batch:
    """Return the sequences from `start` up to but not including `end`, with the keys of their rows."""
    width = int(batch.lengths_B[start:end].max())
    positions_BT, first, last = batch.position_ids_BT, start, end
    if positions_BT is not None:
        ends_B = batch.row_starts().sum(dim=1).cumsum(0).tolist()
        first, last = ends_B[start - 1] if start else 0, ends_B[end - 1]
        positions_BT = positions_BT[start:end, :width].contiguous()
    targets_NK = batch.targets_NK
    if targets_NK is not None:
        assert positions_BT is None, "rows of a head are not packed, so that each sequence is one row"
        row_N = batch.loss_token_rows
        targets_NK = targets_NK[(row_N >= start) & (row_N < end)]
    values_NK = batch.row_values_NK
    return Batch(
        input_ids_BT=batch.input_ids_BT[start:end, :width].contiguous(),
        labels_BT=batch.labels_BT[start:end, :width].contiguous(),
        lengths_B=batch.lengths_B[start:end],
        keys=batch.keys[first:last],
        position_ids_BT=positions_BT,
        targets_NK=targets_NK,
        two_sided=batch.two_sided,
        row_values_NK=None if values_NK is None else values_NK[first:last],
    )


def split_packed_sequence(sequence: Batch, parts: int) -> list[Batch]:
    """Split the rows of one packed sequence into `parts` sequences, or one per row if there are fewer."""
    assert sequence.position_ids_BT is not None, "only packed rows have positions"
    starts = sequence.row_starts()[0].nonzero()[:, 0].tolist()
    ends = [*starts[1:], int(sequence.lengths_B[0])]
    result = []
    for group in torch.arange(sequence.rows).tensor_split(min(parts, sequence.rows)):
        first, last = int(group[0]), int(group[-1])
        columns = slice(starts[first], ends[last])
        result.append(
            Batch(
                input_ids_BT=sequence.input_ids_BT[:, columns].contiguous(),
                labels_BT=sequence.labels_BT[:, columns].contiguous(),
                lengths_B=sequence.lengths_B.new_tensor([ends[last] - starts[first]]),
                keys=sequence.keys[first : last + 1],
                position_ids_BT=sequence.position_ids_BT[:, columns].contiguous(),
                row_values_NK=None if sequence.row_values_NK is None else sequence.row_values_NK[first : last + 1],
            )
        )
    return result
