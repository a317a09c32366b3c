"""Counts and results of an optimizer step, and its record in log.jsonl."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.objective import Objective, WeightedMean, denominator_of, metric_values
from partita_trainers.process_group import ProcessGroup


@dataclass(frozen=True)
class StepStats:
    """Counts of a step, on one rank or merged over all ranks."""

    batches: int
    """Micro-batches with loss tokens, on the rank that has most."""
    rows: int
    denominator: float
    """Denominator of the objective."""
    loss_tokens: int
    tokens: int
    padded_tokens: int
    """Tokens including padding."""
    digests: Mapping[int, bytes]
    """By index of the micro-batch in the step, a hash of everything that determines the work of the micro-batch."""

    @classmethod
    def of(cls, global_batch: GlobalBatch, objective: Objective, process_group: ProcessGroup) -> "StepStats":
        """Return the counts of this rank. Micro-batch m belongs to rank m modulo the world size."""
        batches = global_batch.micro_batches
        return cls(
            batches=sum(batch.loss_tokens > 0 for batch in batches),
            rows=sum(batch.rows for batch in batches),
            denominator=sum(denominator_of(objective, batch) for batch in batches),
            loss_tokens=sum(batch.loss_tokens for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            padded_tokens=sum(batch.input_ids_BT.numel() for batch in batches),
            digests={
                process_group.rank + index * process_group.world_size: batch_digest(batch)
                for index, batch in enumerate(batches)
            },
        )

    @classmethod
    def merge(cls, shares: Sequence["StepStats"]) -> "StepStats":
        """Merge the counts of all ranks."""
        return cls(
            batches=max(stats.batches for stats in shares),
            rows=sum(stats.rows for stats in shares),
            denominator=sum(stats.denominator for stats in shares),
            loss_tokens=sum(stats.loss_tokens for stats in shares),
            tokens=sum(stats.tokens for stats in shares),
            padded_tokens=sum(stats.padded_tokens for stats in shares),
            digests={slot: digest for stats in shares for slot, digest in stats.digests.items()},
        )

    @property
    def batch_hash(self) -> str:
        """Hash of the row keys, ids, masks and labels of a step: equal exactly if the work of the step is equal."""
        whole = b"".join(self.digests[slot] for slot in sorted(self.digests))
        return hashlib.blake2b(whole, digest_size=8).hexdigest()


@dataclass(frozen=True)
class StepRequests:
    """What is to happen after a step, on one rank or on any rank."""

    stop: bool = False
    """Whether training was asked to stop."""
    checkpoint: bool = False
    """Whether the last checkpoint has become too old."""

    @classmethod
    def merge(cls, ranks: Sequence["StepRequests"]) -> "StepRequests":
        """Merge the requests of all ranks."""
        return cls(stop=any(one.stop for one in ranks), checkpoint=any(one.checkpoint for one in ranks))


@dataclass(frozen=True)
class StepResult:
    """The result of a step over all ranks."""

    loss: float
    """Sum of the objective over the step, divided by its denominator."""
    metrics: Mapping[str, WeightedMean]
    """Metrics of the objective."""
    gradient_norm: float
    """Norm of all gradients before clipping."""
    stats: StepStats
    """Counts over all ranks."""
    requests: StepRequests
    """Requests of any rank."""


def batch_digest(batch: Batch) -> bytes:
    """Return a hash of the row keys, ids, masks and labels of a micro-batch."""
    digest = hashlib.blake2b("\0".join(batch.keys).encode(), digest_size=8)
    for tensor in (batch.input_ids_BT, batch.lengths_B, batch.labels_BT, batch.position_ids_BT, batch.row_values_NK):
        if tensor is None:
            continue
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().tobytes())
    return digest.digest()


def step_record(
    outcome: StepResult, *, number: int, epoch: float, learning_rate: float, seconds: float
) -> dict[str, Any]:
    """Return the log.jsonl record of a step.

    Args:
        outcome: Result of the step over all ranks.
        number: Number of the step, from 1.
        epoch: Passes over the data after the step.
        learning_rate: Learning rate of the step.
        seconds: Duration of the step.

    Raises:
        TrainingError: A metric of the objective has the name of another value.
    """
    stats = outcome.stats
    record = {
        "step": number,
        "epoch": round(epoch, 6),
        "loss": outcome.loss,
        "learning_rate": learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "rows": stats.rows,
        "loss_tokens": stats.loss_tokens,
        "tokens": stats.tokens,
        "padding": round(1 - stats.tokens / stats.padded_tokens, 6) if stats.padded_tokens else 0.0,
        "seconds": round(seconds, 4),
        "batch_hash": stats.batch_hash,
    }
    return record | metric_values(outcome.metrics, reserved=record)
