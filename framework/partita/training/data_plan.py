"""Figures on a run's use of data: for the log at the start of training, and for `partita explain --data`."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from partita.data.batching.auto_batching import expected_batches, expected_padding
from partita.data.batching.policies import Policy
from partita_schema.common.text import counted
from partita_schema.sections.batching import Batching

LEAST_LEFT_OUT = 0.01
"""Smallest share of rows left out that is named."""


@dataclass(frozen=True)
class DataPlan:
    """How training rows are read and batched."""

    rows: int | None
    """Rows in one epoch; None for streams, whose length is unknown."""
    tokens: int | None
    """Their tokens, without padding."""
    mean_tokens: float
    """Mean tokens per row; for a stream, of its first rows."""
    longest: int
    """Tokens of the longest row; for a stream, of the longest among its first rows."""
    measured_rows: int
    """Number of rows whose lengths are known."""
    batching: str
    """The batching policy with its sizes, in words."""
    reason: str
    """Why it was chosen, if data.batching is auto; else empty."""
    window: int
    """Rows that are planned together."""
    padding: float
    """Expected share of padding among all tokens of a batch."""
    batches_per_step: int
    steps_per_epoch: int | None
    steps: int | None
    """Steps of the whole run; None if nothing limits it."""
    shards: int | None = None
    """Number of shards of a stream."""
    shard_groups: int | None = None
    """Number of shard groups in which they are read."""
    left_out: float = 0.0
    """Expected share of the rows that `drop_last` leaves out of an epoch."""
    unit: str = "row"
    """What a batch consists of: a row, or a chunk of joined documents."""

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the plan in words: the data, and how it is batched."""
        steps = [f"{counted(self.steps_per_epoch, 'step')} an epoch"] if self.steps_per_epoch is not None else []
        steps += [f"{self.steps:,} in all" if steps else counted(self.steps, "step")] if self.steps is not None else []
        batches = counted(self.batches_per_step, "batch", "batches")
        cut = f"{self.batching}, {batches} a step, {100 * self.padding:.1f} % padding expected"
        if self.left_out >= LEAST_LEFT_OUT:
            cut += f"; about {100 * self.left_out:.0f} % of the {self.unit}s left out of each epoch by drop_last"
        lines = [f"{self._rows()}; {', '.join(steps)}" if steps else self._rows(), cut]
        return [*lines, self.reason] if self.reason else lines

    def _rows(self) -> str:
        if self.rows is not None:
            rows, tokens = counted(self.rows, f"training {self.unit}"), counted(self.tokens or 0, "token")
            return f"{rows}, {tokens}, longest {self.longest:,}"
        shards, groups = counted(self.shards or 1, "shard"), counted(self.shard_groups or 1, "shard group")
        return (
            f"a stream of {shards} in {groups}; its first {counted(self.measured_rows, self.unit)}: "
            f"{self.mean_tokens:,.0f} tokens on average, longest {self.longest:,}"
        )


def plan_of(
    lengths: np.ndarray,
    *,
    batching: Batching,
    policy: Policy,
    batches_per_step: int,
    steps: int | None,
    steps_per_epoch: int | None = None,
    shards: int | None = None,
    shard_groups: int | None = None,
    reason: str = "",
) -> DataPlan:
    """Return the plan of training rows.

    Args:
        lengths: Tokens of each row of an epoch; of a stream, of its first rows.
        batching: The batching section; not auto.
        policy: The policy built from it.
        batches_per_step: Batches in one optimizer step, over all ranks.
        steps: Optimizer steps of the run; None if nothing limits it.
        steps_per_epoch: Optimizer steps in one epoch; None for a stream.
        shards: Number of shards of a stream; None for rows by index.
        shard_groups: Number of shard groups of a stream.
        reason: Why this batching was chosen.
    """
    is_stream = shards is not None
    padding, left_out = (expected_padding(lengths, policy), 0.0) if is_stream else expected_batches(lengths, policy)
    return DataPlan(
        rows=None if is_stream else len(lengths),
        tokens=None if is_stream else int(lengths.sum()),
        mean_tokens=float(lengths.mean()),
        longest=int(lengths.max()),
        measured_rows=len(lengths),
        batching=batching_text(batching, policy),
        reason=reason,
        window=policy.window,
        padding=padding,
        left_out=left_out,
        batches_per_step=batches_per_step,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        shards=shards,
        shard_groups=shard_groups,
        unit="chunk" if batching.type == "chunk" else "row",
    )


def batching_text(batching: Batching, policy: Policy) -> str:
    """Return the batching in words, such as `bucket of 16 rows in windows of 2,048`."""
    size = getattr(policy, "batch_size", None)
    window = counted(policy.window, "row")
    tokens = counted(policy.max_row_tokens, "token") if policy.max_row_tokens is not None else ""
    if batching.type == "pack":
        sequences = counted(getattr(policy, "sequences", 1), "sequence")
        return f"pack: {sequences} of {tokens} a batch, windows of {window}"
    if batching.type == "chunk":
        order = "shuffled" if policy.shuffle_rows else "in their order"
        return (
            f"chunk: {counted(size or 1, 'chunk')} of {counted(batching.context_length or 0, 'token')} a batch, {order}"
        )
    if batching.type == "token_budget":
        most = f" and {counted(batching.max_rows, 'row')}" if batching.max_rows is not None else ""
        return f"token_budget: up to {tokens}{most} a batch, windows of {window}"
    if batching.type == "bucket":
        return f"bucket: {counted(size or 1, 'row')} a batch, windows of {window}"
    shuffled = "shuffled" if policy.shuffle_rows else "in their order"
    return f"fixed: {counted(size or 1, 'row')} a batch, {shuffled}"
