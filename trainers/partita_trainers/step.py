"""One optimizer step over any number of micro-batches on any number of ranks, with the same result for all numbers.

The loss of a step is the sum of the objective over all micro-batches of all ranks, divided by the sum of its
denominators, so that splitting the same rows into more micro-batches changes only the order of a sum. A step that runs
out of memory is retried with smaller micro-batches, and later steps use them too. Dropout and noise are seeded by the
seed, the step and the rows of the micro-batch, and therefore do not depend on the rank.

Gradients are summed over the ranks after the last backward pass, not during it: a rank that runs out of memory can then
retry its part of the step without the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from partita_schema.errors import DivergenceError, OtherRankError, TrainingError
from partita_trainers.base import Batches, GlobalBatch
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.engine import TrainEngine
from partita_trainers.gradients import accumulate, captured, prepare_objective
from partita_trainers.interrupt import never
from partita_trainers.micro_batches import MicroBatchSplitter
from partita_trainers.objective import LossSums
from partita_trainers.optimizers import set_learning_rate
from partita_trainers.sharding import communication_errors
from partita_trainers.step_stats import StepResult, StepStats


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
class RankResult:
    """What one rank sends to the others after its backward passes."""

    sums: LossSums
    """The objective over its micro-batches."""
    has_gradients: Sequence[bool]
    """For each trained parameter, whether it has a gradient."""
    parts: int
    """Number of parts that each of its micro-batches is split into."""
    events: Sequence[dict[str, int]]
    """Out-of-memory events of this step."""
    failure: TrainingError | None
    """The error on this rank; None if it succeeded."""
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
    """Take one optimizer step: forward and backward on the micro-batches of this rank, clipping, update.

    Every rank must call it: gradients, sizes and failures are exchanged.

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
        TrainingError: One row does not fit in memory, memory ran out in the optimizer, or the objective's denominator
            is not positive.
        OtherRankError: Another rank raised one of these.
    """
    set_learning_rate(engine.raw_optimizers, learning_rate)
    process_group, num_earlier_events = engine.process_group, len(splitter.events)
    global_stats = gather_stats(global_batch, number=number, engine=engine)
    _, failure = captured(
        partial(prepare_objective, global_batch, number=number, engine=engine, splitter=splitter, seed=seed)
    )
    with engine.lm.training():
        sums = None
        if failure is None:
            work = partial(accumulate, global_batch, global_stats=global_stats)
            sums, failure = captured(partial(work, number=number, engine=engine, splitter=splitter, seed=seed))
        # A failure is sent and not raised yet: every rank must take part in this exchange, or the others would wait.
        events = splitter.events[num_earlier_events:]
        mine = RankResult(sums or LossSums(), engine.has_gradients(), splitter.parts, events, failure, stop())
        results = process_group.all_gather_object(mine, "the gradients of a step")
        raise_first_failure(results, own=failure, rank=process_group.rank)
        norm = update_weights(engine, number=number, has_gradients=[one.has_gradients for one in results])
    splitter.parts = max(one.parts for one in results)
    splitter.events[num_earlier_events:] = [event for one in results for event in one.events]
    return step_result(results, norm=norm, global_stats=global_stats)


def gather_stats(global_batch: GlobalBatch, *, number: int, engine: TrainEngine) -> StepStats:
    """Return the sizes of a step on all ranks. Raise TrainingError if the objective's denominator is not positive."""
    mine = StepStats.of(global_batch, engine.objective, engine.process_group)
    global_stats = StepStats.merge(engine.process_group.all_gather_object(mine, "the sizes of a step"))
    denominator = global_stats.denominator
    if not (math.isfinite(denominator) and denominator > 0):
        raise TrainingError(
            f"step {number}: the objective's denominator is {denominator:g}; it must be a positive number: let "
            "Objective.denominator count what the loss is averaged over"
        )
    return global_stats


def step_result(results: Sequence[RankResult], *, norm: float, global_stats: StepStats) -> StepResult:
    """Merge the results of all ranks: the loss is the sum over all ranks, divided by the sum of denominators."""
    total = LossSums.merge([one.sums for one in results])
    return StepResult(
        loss=total.loss / global_stats.denominator,
        metrics=total.metrics,
        gradient_norm=norm,
        stats=global_stats,
        stop=any(one.stop for one in results),
    )


def update_weights(engine: TrainEngine, *, number: int, has_gradients: Sequence[Sequence[bool]]) -> float:
    """Clip the gradients of all ranks and update the weights. Return the norm of the gradients.

    Raises:
        DivergenceError: The norm is not finite; the weights are unchanged.
        TrainingError: Memory ran out. Some weights may have changed, so the step cannot be retried.
    """
    norm, memory_error = attempt(partial(clip_and_update, engine, number=number, has_gradients=has_gradients))
    if memory_error is not None or norm is None:
        raise TrainingError(
            f"step {number}: out of memory while the weights were updated; some of them may have changed already. The "
            "last checkpoint is intact: free memory on the device and start the run again, or begin a new one with an "
            "adapter or optimizer: {type: adamw_8bit}"
        ) from memory_error
    return norm


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


def clip_and_update(engine: TrainEngine, *, number: int, has_gradients: Sequence[Sequence[bool]]) -> float:
    """Sum the gradients over the ranks, clip them, check their norm and update the weights. Return the norm."""
    engine.all_reduce_gradients(has_gradients)
    with communication_errors("the norm of the gradients"):
        norm = engine.clip()
    if not math.isfinite(norm) and engine.accelerator.scaler is None:
        raise DivergenceError(f"step {number}: the norm of the gradients is {norm}")
    engine.optimizer_step(number)
    return norm
