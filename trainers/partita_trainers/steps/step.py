"""One optimizer step over any number of micro-batches on any number of ranks, with the same result for all numbers.

The loss of a step is the sum of the objective over all micro-batches of all ranks, divided by the sum of its
denominators, so that splitting the same rows into more micro-batches changes only the order of a sum. A step that runs
out of memory is retried with smaller micro-batches, and later steps use them too. Dropout and noise are seeded by the
seed, the step and the rows of the micro-batch, and therefore do not depend on the rank.

Gradients are summed over the ranks after the last backward pass, not during it: a rank that runs out of memory can then
retry its part of the step without the others.

The host waits for an accelerator once in a step: before the update, when it reads the losses, metrics and the norm of
the gradients together. The weights are still unchanged then, and the device computes the update while the host logs the
step and prepares the next one.
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
from partita_trainers.objective import LossSums, exchange
from partita_trainers.optimizers import set_learning_rate
from partita_trainers.process_group import ProcessGroup
from partita_trainers.sharding import communication_errors
from partita_trainers.steps.gradients import (
    MicroBatchLosses,
    accumulate,
    captured,
    check_losses,
    prepare_objective,
    read_losses,
)
from partita_trainers.steps.micro_batches import MicroBatchSplitter
from partita_trainers.steps.step_stats import StepRequests, StepResult, StepStats


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

    has_gradients: Sequence[bool]
    """For each trained parameter, whether it has a gradient."""
    parts: int
    """Number of parts that each of its micro-batches is split into."""
    events: Sequence[dict[str, int]]
    """Out-of-memory events of this step."""
    failure: TrainingError | None
    """The error on this rank; None if it succeeded."""
    requests: StepRequests
    """What it wants to happen after the step."""


def take_step(
    global_batch: GlobalBatch,
    *,
    number: int,
    learning_rate: float,
    engine: TrainEngine,
    splitter: MicroBatchSplitter,
    seed: int,
    requests: Callable[[], StepRequests] = StepRequests,
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
        requests: Returns what this rank wants to happen after the step; called after its backward passes.

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
    exchange(engine.objective, engine.context)
    with engine.lm.training():
        passes = None
        if failure is None:
            work = partial(accumulate, global_batch, global_stats=global_stats)
            passes, failure = captured(partial(work, number=number, engine=engine, splitter=splitter, seed=seed))
        # A failure is sent and not raised yet: every rank must take part in this exchange, or the others would wait.
        events = splitter.events[num_earlier_events:]
        mine = RankResult(engine.has_gradients(), splitter.parts, events, failure, requests())
        results = process_group.all_gather_object(mine, "the gradients of a step")
        raise_first_failure([one.failure for one in results], own=failure, rank=process_group.rank)
        has_gradients = [one.has_gradients for one in results]
        sums, norm = update_weights(engine, passes or MicroBatchLosses(), number=number, has_gradients=has_gradients)
    splitter.parts = max(one.parts for one in results)
    splitter.events[num_earlier_events:] = [event for one in results for event in one.events]
    return StepResult(
        loss=sums.loss / global_stats.denominator,
        metrics=sums.metrics,
        gradient_norm=norm,
        stats=global_stats,
        requests=StepRequests.merge([one.requests for one in results]),
    )


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


def update_weights(
    engine: TrainEngine, passes: MicroBatchLosses, *, number: int, has_gradients: Sequence[Sequence[bool]]
) -> tuple[LossSums, float]:
    """Clip the gradients of all ranks and update the weights. Return the sums of all ranks and the gradients' norm.

    Args:
        engine: Has the gradients and the optimizers.
        passes: The micro-batches of this rank and their results.
        number: Number of the step, from 1.
        has_gradients: For each rank, which parameters have a gradient.

    Raises:
        DivergenceError: A loss or the norm is not finite; the weights are unchanged.
        TrainingError: Memory ran out. Some weights may have changed, so the step cannot be retried.
        OtherRankError: A loss of another rank is not finite.
    """
    work = partial(clip_and_update, engine, passes, number=number, has_gradients=has_gradients)
    results, memory_error = attempt(work)
    if memory_error is not None or results is None:
        raise TrainingError(
            f"step {number}: out of memory while the weights were updated; some of them may have changed already. The "
            "last checkpoint is intact: free memory on the device and start the run again, or begin a new one with an "
            "adapter or optimizer: {type: adamw_8bit}"
        ) from memory_error
    return results


def raise_first_failure(failures: Sequence[TrainingError | None], *, own: TrainingError | None, rank: int) -> None:
    """Raise the failure of the first rank that has one; on the other ranks an OtherRankError that it is the cause of.

    Args:
        failures: The failures of all ranks; the exchange copies them without their causes.
        own: The failure of this rank, which is raised with its cause.
        rank: This rank.
    """
    for other, failure in enumerate(failures):
        if failure is None:
            continue
        if own is not None and other == rank:
            raise own
        raise OtherRankError(f"rank {other} failed: {failure}") from failure


def clip_and_update(
    engine: TrainEngine, passes: MicroBatchLosses, *, number: int, has_gradients: Sequence[Sequence[bool]]
) -> tuple[LossSums, float]:
    """Sum the gradients over the ranks, clip them, check losses and norm, and update the weights.

    See `update_weights` for the arguments and the result.
    """
    engine.all_reduce_gradients(has_gradients)
    with communication_errors("the norm of the gradients"):
        sums, norm = read_losses(passes, engine.clip())
    total = merge_ranks(sums, passes, number=number, process_group=engine.process_group)
    if not math.isfinite(norm) and engine.accelerator.scaler is None:
        raise DivergenceError(f"step {number}: the norm of the gradients is {norm}")
    engine.optimizer_step(number)
    return total, norm


def merge_ranks(
    sums: Sequence[LossSums], passes: MicroBatchLosses, *, number: int, process_group: ProcessGroup
) -> LossSums:
    """Return the sums of all ranks together.

    Args:
        sums: The sums of the micro-batches of this rank.
        passes: These micro-batches.
        number: Number of the step, from 1.
        process_group: All ranks.

    Raises:
        DivergenceError: A loss of this rank is not finite.
        OtherRankError: A loss of another rank is not finite.
    """
    _, failure = captured(partial(check_losses, sums, passes.micro_batches, number=number))
    of_ranks = process_group.all_gather_object((LossSums.merge(sums), failure), "the losses of a step")
    raise_first_failure([one for _, one in of_ranks], own=failure, rank=process_group.rank)
    return LossSums.merge([one for one, _ in of_ranks])
