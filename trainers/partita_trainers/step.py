"""One optimizer step over any number of micro-batches on any number of ranks, with the same result for all numbers.

The loss of a step is the sum over the loss tokens of all ranks divided by their count, so that splitting the same rows
into more micro-batches changes only the order of a sum. A step that runs out of memory is retried with smaller
micro-batches, and later steps use them too. Dropout and noise are seeded by the seed, the step and the rows of the
micro-batch, and therefore do not depend on the rank.

Gradients are summed over the ranks after the last backward pass, not during it: a rank that runs out of memory can then
retry its part of the step without the others.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from partita_schema.counted import counted
from partita_schema.errors import DivergenceError, OtherRankError, OutOfStepError, TrainingError
from partita_trainers.base import Batch, Batches, GlobalBatch
from partita_trainers.batch_size.memory import attempt
from partita_trainers.engine import TrainEngine
from partita_trainers.interrupt import never
from partita_trainers.micro_batches import MicroBatchSplitter
from partita_trainers.optimizers import set_learning_rate
from partita_trainers.preserved_state import clear_gradients
from partita_trainers.process_group import ProcessGroup
from partita_trainers.sharding import communication_errors


@contextmanager
def open_steps(batches: Batches) -> Iterator[Iterator[GlobalBatch]]:
    """Iterate over the steps; on exit, close the files and processes that produce them."""
    steps = batches.steps()
    try:
        yield steps
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class StepStats:
    """Counts of a step, on one rank or merged over all ranks."""

    batches: int
    """Micro-batches with loss tokens, on the rank that has most."""
    rows: int
    loss_tokens: int
    tokens: int
    padded_tokens: int
    """Tokens including padding."""
    digests: Mapping[int, bytes]
    """By slot of the step, a hash of everything that determines the work of the micro-batch."""

    @classmethod
    def of(cls, global_batch: GlobalBatch, process_group: ProcessGroup) -> "StepStats":
        """Return the counts of this rank. Slot s belongs to rank s modulo the world size."""
        batches = global_batch.micro_batches
        return cls(
            batches=sum(batch.loss_tokens > 0 for batch in batches),
            rows=sum(batch.rows for batch in batches),
            loss_tokens=sum(batch.loss_tokens for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            padded_tokens=sum(batch.input_ids_BT.numel() for batch in batches),
            digests={
                process_group.rank + place * process_group.world_size: batch_digest(batch)
                for place, batch in enumerate(batches)
            },
        )

    @classmethod
    def merge(cls, shares: Sequence["StepStats"]) -> "StepStats":
        """Merge the counts of all ranks."""
        return cls(
            batches=max(share.batches for share in shares),
            rows=sum(share.rows for share in shares),
            loss_tokens=sum(share.loss_tokens for share in shares),
            tokens=sum(share.tokens for share in shares),
            padded_tokens=sum(share.padded_tokens for share in shares),
            digests={slot: digest for share in shares for slot, digest in share.digests.items()},
        )

    @property
    def batch_hash(self) -> str:
        """Hash of the row keys, ids, masks and labels of a step: equal exactly if the work of the step is equal."""
        whole = b"".join(self.digests[slot] for slot in sorted(self.digests))
        return hashlib.blake2b(whole, digest_size=8).hexdigest()


@dataclass(frozen=True)
class StepResult:
    """The result of a step over all ranks."""

    loss: float
    """Mean cross-entropy of the step's loss tokens, in nats."""
    gradient_norm: float
    """Norm of all gradients before clipping."""
    stats: StepStats
    """Counts over all ranks."""
    stop: bool
    """Whether any rank was asked to stop."""


@dataclass(frozen=True)
class RankResult:
    """What one rank sends to the others after its backward passes."""

    loss: float
    """Sum over its loss tokens."""
    has_gradients: Sequence[bool]
    """For each trained parameter, whether it has a gradient."""
    parts: int
    """Number of parts that each of its micro-batches is split into."""
    events: Sequence[dict[str, int]]
    """Out-of-memory events of this step."""
    failure: TrainingError | None
    """Why it has no gradients."""
    stop: bool
    """Whether it was asked to stop."""


def take_step(
    global_batch: GlobalBatch,
    *,
    number: int,
    learning_rate: float,
    engine: TrainEngine,
    splitter: MicroBatchSplitter,
    seed: int,
    stop: Callable[[], bool] = never,
) -> StepResult:
    """Run forward, backward, clipping and the optimizer on the micro-batches of this rank.

    If memory runs out before the weights change, this rank retries its part with every micro-batch halved, down to one
    row. `splitter` keeps that for later steps.

    Args:
        global_batch: The micro-batches of this rank.
        number: Number of the step, from 1.
        learning_rate: Learning rate of this step.
        engine: Runs the forward and backward passes and the optimizer.
        splitter: How finely micro-batches are split so far; updated.
        seed: Seed of dropout and noise.
        stop: Returns whether the user asked to stop.

    Raises:
        DivergenceError: A loss or the gradient norm is not finite; the weights are unchanged.
        TrainingError: One row does not fit in memory, or memory ran out in the optimizer.
        OtherRankError: Another rank raised one of these.
    """
    set_learning_rate(engine.raw_optimizers, learning_rate)
    process_group, known = engine.process_group, len(splitter.events)
    share = StepStats.merge(
        process_group.all_gather_object(StepStats.of(global_batch, process_group), "the sizes of a step")
    )
    with engine.lm.training():
        total, failure = 0.0, None
        try:
            if engine.shards is None:
                total = accumulate_gradients(
                    global_batch,
                    number=number,
                    engine=engine,
                    splitter=splitter,
                    seed=seed,
                    loss_tokens=share.loss_tokens,
                )
            else:
                total = accumulate_sharded_gradients(global_batch, number=number, engine=engine, seed=seed, share=share)
        except OutOfStepError:
            raise
        except TrainingError as error:
            failure = error
        mine = RankResult(total, engine.has_gradients(), splitter.parts, splitter.events[known:], failure, stop())
        results = process_group.all_gather_object(mine, "the gradients of a step")
        raise_first_failure(results, own=failure, rank=process_group.rank)
        there = [one.has_gradients for one in results]
        norm, full = attempt(partial(clip_and_update, engine, number=number, there=there))
    if full is not None or norm is None:
        raise TrainingError(
            f"step {number}: out of memory while the weights were changed, which may have left them half changed. The "
            "weights of the last checkpoint are unharmed: free memory on the device and start the run again, or begin "
            "a new one with an adapter or optimizer: {type: adamw_8bit}"
        ) from full
    splitter.parts = max(one.parts for one in results)
    splitter.events[known:] = [event for one in results for event in one.events]
    return StepResult(
        loss=sum(one.loss for one in results) / share.loss_tokens,
        gradient_norm=norm,
        stats=share,
        stop=any(one.stop for one in results),
    )


def raise_first_failure(results: Sequence[RankResult], *, own: TrainingError | None, rank: int) -> None:
    """Raise the failure of the first rank that has one; on the other ranks OtherRankError.

    Args:
        results: The results of all ranks; the exchange copies failures without their causes.
        own: The failure of this rank, which is raised with its cause.
        rank: This rank.
    """
    failed = next((other for other, result in enumerate(results) if result.failure is not None), None)
    if failed is not None:
        raise own if own is not None and failed == rank else OtherRankError(f"rank {failed} failed")


def accumulate_gradients(
    global_batch: GlobalBatch,
    *,
    number: int,
    engine: TrainEngine,
    splitter: MicroBatchSplitter,
    seed: int,
    loss_tokens: int,
) -> float:
    """Run this rank's micro-batches, leave their gradients in the module and return the sum of the loss.

    Args:
        global_batch: The micro-batches of this rank.
        number: Number of the step, from 1.
        engine: Runs the forward and backward passes.
        splitter: How finely micro-batches are split so far; updated.
        seed: Seed of dropout and noise.
        loss_tokens: Loss tokens of the step on all ranks.

    Raises:
        DivergenceError: A loss is not finite.
        TrainingError: One row does not fit in memory.
    """
    while True:
        parts, sums = splitter.split(global_batch.micro_batches), list[torch.Tensor]()

        def work(parts: Sequence[Batch] = parts, sums: list[torch.Tensor] = sums) -> None:
            for part in parts:
                torch.manual_seed(noise_seed(seed, number, part))
                engine.forward_backward([part], loss_tokens=loss_tokens, sums=sums)

        _, failure = attempt(work)
        if failure is None:
            losses = torch.stack(sums).tolist() if sums else []
            check_losses(losses, parts, number=number)
            return float(sum(losses))
        clear_gradients(engine.lm.module)
        splitter.halve(parts[len(sums)], number=number, failure=failure)


def accumulate_sharded_gradients(
    global_batch: GlobalBatch, *, number: int, engine: TrainEngine, seed: int, share: StepStats
) -> float:
    """Accumulate gradients under FSDP, where each pass is a collective and all ranks take the same number of passes.

    Args:
        global_batch: The micro-batches of this rank.
        number: Number of the step, from 1.
        engine: Runs the forward and backward passes.
        seed: Seed of dropout and noise.
        share: Counts of the step over all ranks.

    Raises:
        DivergenceError: A loss is not finite.
        OutOfStepError: Memory ran out. No rank can retry its part alone.
    """
    parts, sums = [batch for batch in global_batch.micro_batches if batch.loss_tokens], list[torch.Tensor]()

    def work() -> None:
        for part in parts:
            torch.manual_seed(noise_seed(seed, number, part))
            engine.forward_backward([part], loss_tokens=share.loss_tokens, sums=sums)
        for _ in range(share.batches - len(parts)):
            engine.forward_backward_idle()

    with communication_errors("the gradients of a step"):
        _, failure = attempt(work)
    if failure is not None:
        rows, tokens = parts[min(len(sums), len(parts) - 1)].input_ids_BT.shape if parts else (1, 2)
        shown = counted(rows, "row")
        raise OutOfStepError(
            f"step {number}: out of memory on rank {engine.process_group.rank} with {shown} of {tokens:,} tokens, "
            "and processes that share the weights cannot take a step again in smaller parts: lower "
            "trainer.batch_size, write trainer.gradient_checkpointing: true, or take more processes, and start the "
            "same command again"
        ) from failure
    losses = torch.stack(sums).tolist() if sums else []
    check_losses(losses, parts, number=number)
    return float(sum(losses))


def noise_seed(seed: int, number: int, batch: Batch) -> int:
    """Return the seed of dropout and noise for a micro-batch in step `number`."""
    data = "\0".join((str(seed), str(number), *batch.keys)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def clip_and_update(engine: TrainEngine, *, number: int, there: Sequence[Sequence[bool]]) -> float:
    """Sum the gradients over the ranks, clip them, check their norm and update the weights. Return the norm."""
    engine.all_reduce_gradients(there)
    with communication_errors("the norm of the gradients"):
        norm = engine.clip()
    if not math.isfinite(norm) and engine.accelerator.scaler is None:
        raise DivergenceError(f"step {number}: the norm of the gradients is {norm}")
    engine.optimizer_step(number)
    return norm


def check_losses(sums: list[float], batches: list[Batch], *, number: int) -> None:
    """Raise DivergenceError with the rows of the first loss that is not finite."""
    for total, batch in zip(sums, batches, strict=True):
        if not math.isfinite(total):
            rows = ", ".join(batch.keys[:8]) + (", ..." if batch.rows > 8 else "")
            raise DivergenceError(f"step {number}: the loss is {total} on rows {rows}")


def batch_digest(batch: Batch) -> bytes:
    """Return a hash of the row keys, ids, masks and labels of a micro-batch."""
    digest = hashlib.blake2b("\0".join(batch.keys).encode(), digest_size=8)
    for tensor in (batch.input_ids_BT, batch.lengths_B, batch.labels_BT, batch.position_ids_BT):
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
    """
    share = outcome.stats
    return {
        "step": number,
        "epoch": round(epoch, 6),
        "loss": outcome.loss,
        "learning_rate": learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "rows": share.rows,
        "loss_tokens": share.loss_tokens,
        "tokens": share.tokens,
        "padding": round(1 - share.tokens / share.padded_tokens, 6) if share.padded_tokens else 0.0,
        "seconds": round(seconds, 4),
        "batch_hash": share.batch_hash,
    }
