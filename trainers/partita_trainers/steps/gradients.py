"""Compute the gradients of one rank in a step, with micro-batches split until they fit in its memory.

Without FSDP, a rank that runs out of memory retries its micro-batches in smaller parts. Under FSDP every pass involves
all ranks, so that no rank can retry alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import torch

from partita_schema.common.hashing import hash_to_int
from partita_schema.common.text import counted
from partita_schema.errors import DivergenceError, OutOfStepError, TrainingError
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.checkpoints.preserved_state import clear_gradients
from partita_trainers.device_copies import fetch_scalars
from partita_trainers.engine import IDLE, MicroBatchLoss, TrainEngine
from partita_trainers.objective import LossSums, WeightedMean
from partita_trainers.sharding import communication_errors
from partita_trainers.steps.micro_batches import MicroBatchSplitter
from partita_trainers.steps.step_stats import StepStats

T = TypeVar("T")


class MicroBatchLosses(NamedTuple):
    """The micro-batches of one rank in a step, and their results, which are not read from the device yet."""

    micro_batches: Sequence[Batch] = ()
    losses: Sequence[MicroBatchLoss] = ()


def captured(call: Callable[[], T]) -> tuple[T | None, TrainingError | None]:
    """Return the result of a call, or the TrainingError that it raises; other ranks learn of it in the next exchange.

    Raises OutOfStepError, which means that there is no next exchange.
    """
    try:
        return call(), None
    except OutOfStepError:
        raise
    except TrainingError as error:
        return None, error


def prepare_objective(
    global_batch: GlobalBatch, *, number: int, engine: TrainEngine, splitter: MicroBatchSplitter, seed: int
) -> None:
    """Run what the objective computes before the first loss of a step, on smaller micro-batches if memory runs out.

    Args:
        global_batch: The micro-batches of this rank.
        number: Number of the step, from 1.
        engine: Has the objective and its model.
        splitter: How finely micro-batches are split so far; updated.
        seed: Seed of dropout and noise.

    Raises:
        TrainingError: One row does not fit in memory.
        OutOfStepError: Memory ran out under FSDP.
    """
    context = replace(engine.context, noise_seed=partial(noise_seed, seed, number))
    while True:
        micro_batches = splitter.split(global_batch.micro_batches)
        with communication_errors("the preparation of a step"):
            _, failure = attempt(partial(engine.objective.prepare, context, micro_batches))
        if failure is None:
            return
        # The objective does not report which micro-batch failed: it was probably the largest.
        largest = max(micro_batches, key=lambda batch: batch.input_ids_BT.numel())
        if engine.shards is not None:
            raise out_of_step(largest, number=number, rank=engine.process_group.rank) from failure
        splitter.halve(largest, number=number, failure=failure)


def accumulate(
    global_batch: GlobalBatch,
    *,
    number: int,
    engine: TrainEngine,
    splitter: MicroBatchSplitter,
    seed: int,
    global_stats: StepStats,
) -> MicroBatchLosses:
    """Run this rank's micro-batches, accumulate their gradients in the module, and return losses and metrics.

    They are tensors on the device; nothing is read from it.

    Args:
        global_batch: The micro-batches of this rank.
        number: Number of the step, from 1.
        engine: Runs the forward and backward passes.
        splitter: How finely micro-batches are split so far; updated.
        seed: Seed of dropout and noise.
        global_stats: Counts of the step over all ranks.

    Raises:
        TrainingError: One row does not fit in memory.
        OutOfStepError: Memory ran out under FSDP.
    """

    def run_micro_batch(batch: Batch) -> MicroBatchLoss:
        seed_generators(noise_seed(seed, number, batch), device=engine.device)
        return engine.forward_backward(
            batch, denominator=global_stats.denominator, loss_tokens=global_stats.loss_tokens
        )

    if engine.shards is not None:
        return accumulate_sharded(
            global_batch, run_micro_batch, number=number, engine=engine, passes=global_stats.batches
        )
    while True:
        micro_batches, losses = splitter.split(global_batch.micro_batches), list[MicroBatchLoss]()
        _, failure = attempt(partial(run_all, micro_batches, losses, run_micro_batch, engine=engine))
        if failure is None:
            return MicroBatchLosses(micro_batches, losses)
        clear_gradients(engine.lm.module)
        splitter.halve(micro_batches[len(losses)], number=number, failure=failure)


def seed_generators(seed: int, *, device: torch.device) -> None:
    """Seed the random numbers of dropout and noise.

    On a CPU, `torch.manual_seed` would format the call stack three times, for accelerators that are not used.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def run_all(
    micro_batches: Sequence[Batch],
    losses: list[MicroBatchLoss],
    run_micro_batch: Callable[[Batch], MicroBatchLoss],
    *,
    engine: TrainEngine,
) -> None:
    """Run micro-batches and append their results to `losses`.

    Args:
        micro_batches: The micro-batches.
        losses: Gets the results, so that the caller knows how many there are when memory runs out.
        run_micro_batch: Runs forward and backward for one.
        engine: Copies the next micro-batch to the device while one is computed.
    """
    for batch, following in zip_longest(micro_batches, micro_batches[1:]):
        losses.append(run_micro_batch(batch))
        engine.prefetch(following)


def accumulate_sharded(
    global_batch: GlobalBatch,
    run_micro_batch: Callable[[Batch], MicroBatchLoss],
    *,
    number: int,
    engine: TrainEngine,
    passes: int,
) -> MicroBatchLosses:
    """Accumulate gradients under FSDP, where each pass is a collective and all ranks take the same number of passes.

    Args:
        global_batch: The micro-batches of this rank.
        run_micro_batch: Runs forward and backward for one.
        number: Number of the step, from 1.
        engine: Runs idle passes.
        passes: Passes of the rank that has most.

    Raises:
        OutOfStepError: Memory ran out. No rank can retry its part alone.
    """
    micro_batches, losses = [batch for batch in global_batch.micro_batches if batch.loss_tokens], list[MicroBatchLoss]()

    def work() -> None:
        run_all(micro_batches, losses, run_micro_batch, engine=engine)
        for _ in range(passes - len(micro_batches)):
            engine.forward_backward_idle()

    with communication_errors("the gradients of a step"):
        _, failure = attempt(work)
    if failure is not None:
        failed = micro_batches[min(len(losses), len(micro_batches) - 1)] if micro_batches else IDLE
        raise out_of_step(failed, number=number, rank=engine.process_group.rank) from failure
    return MicroBatchLosses(micro_batches, losses)


def out_of_step(failed: Batch, *, number: int, rank: int) -> OutOfStepError:
    """Return the error of a rank whose memory ran out under FSDP, where no rank can retry its part alone."""
    rows, tokens = failed.input_ids_BT.shape
    return OutOfStepError(
        f"step {number}: out of memory on rank {rank} with {counted(rows, 'row')} of {tokens:,} tokens, "
        "and processes that share the weights cannot take a step again in smaller parts: lower "
        "trainer.batch_size, write trainer.gradient_checkpointing: true, or take more processes, and start the "
        "same command again"
    )


def noise_seed(seed: int, number: int, batch: Batch) -> int:
    """Return the seed of dropout and noise for a micro-batch in step `number`."""
    return hash_to_int("\0".join((str(seed), str(number), *batch.keys)), num_bytes=7)


def read_losses(passes: MicroBatchLosses, norm: torch.Tensor) -> tuple[list[LossSums], float]:
    """Return the results of the micro-batches and the norm of the gradients, with a single copy from the device."""
    totals = [total for total, _ in passes.losses]
    means = [mean.total for _, metrics in passes.losses for mean in metrics.values()]
    norm_read, *numbers = fetch_scalars([norm, *totals, *means])
    losses, values = numbers[: len(totals)], iter(numbers[len(totals) :])
    sums = [
        LossSums(loss, {name: WeightedMean(next(values), mean.weight) for name, mean in metrics.items()})
        for loss, (_, metrics) in zip(losses, passes.losses, strict=True)
    ]
    return sums, norm_read


def check_losses(sums: Sequence[LossSums], batches: Sequence[Batch], *, number: int) -> None:
    """Raise DivergenceError with the rows of the first loss that is not finite."""
    for total, batch in zip((one.loss for one in sums), batches, strict=True):
        if not math.isfinite(total):
            rows = ", ".join(batch.keys[:8]) + (", ..." if batch.rows > 8 else "")
            raise DivergenceError(f"step {number}: the loss is {total} on rows {rows}")
