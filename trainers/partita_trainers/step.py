"""One optimizer step over any number of batches on any number of ranks, the same whatever the numbers.

The loss of a step is the sum over all its loss tokens, those of all ranks, divided by their count, so that cutting the
same rows into more batches changes nothing but the order of a sum. That is what a step does where memory ends: it is
taken again in smaller parts, and so are the steps after it. Dropout and noise follow from the seed, the step and the
rows of the batch, and so are the same on whichever rank it is.

Gradients are summed over the ranks once all of a step's are there, and not while they come: a rank whose memory ends
can then begin its part of the step again without the others.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from partita_schema.counted import counted
from partita_schema.errors import DivergenceError, OtherRankError, OutOfStepError, TrainingError
from partita_trainers.base import Batch, Batches, GlobalBatch
from partita_trainers.batch_size.memory import attempt
from partita_trainers.engine import TrainEngine
from partita_trainers.interrupt import never
from partita_trainers.optimizers import set_learning_rate
from partita_trainers.preserved_state import clear_gradients
from partita_trainers.process_group import ProcessGroup
from partita_trainers.sharding import communication_errors

logger = logging.getLogger(__name__)


@contextmanager
def open_steps(batches: Batches) -> Iterator[Iterator[GlobalBatch]]:
    """Steps to take; behind them the files and processes that made them are let go."""
    steps = batches.steps()
    try:
        yield steps
    finally:
        close = getattr(steps, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class StepStats:
    """What of a step a rank has, or all have together."""

    batches: int
    """Batches with something to learn, of the rank that has most."""
    rows: int
    loss_tokens: int
    tokens: int
    padded_tokens: int
    """Tokens and padding."""
    digests: Mapping[int, bytes]
    """By slot of the step, a hash of all that decides the work of the batch."""

    @classmethod
    def of(cls, global_batch: GlobalBatch, process_group: ProcessGroup) -> "StepStats":
        """What this rank has: slot s belongs to rank s modulo their number."""
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
        """What all ranks have."""
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
        """Hash of row keys, ids, masks and labels of a step: equal exactly when the step's work is."""
        whole = b"".join(self.digests[slot] for slot in sorted(self.digests))
        return hashlib.blake2b(whole, digest_size=8).hexdigest()


@dataclass(frozen=True)
class StepResult:
    """What a step was, on all ranks."""

    loss: float
    """Mean cross-entropy of the step's loss tokens, in nats."""
    gradient_norm: float
    """Norm over all gradients before clipping."""
    stats: StepStats
    """What was worked on."""
    stop: bool
    """Whether any rank was asked to stop."""


@dataclass(frozen=True)
class RankResult:
    """What a rank tells once its gradients are there."""

    loss: float
    """Sum over its loss tokens."""
    has_gradients: Sequence[bool]
    """Of each trained parameter, whether it has a gradient."""
    parts: int
    """How finely its batches are cut."""
    events: Sequence[dict[str, int]]
    """Each time that its memory ended in this step."""
    failure: TrainingError | None
    """Why it has no gradients."""
    stop: bool
    """Whether it was asked to stop."""


@dataclass
class MicroBatchSplitter:
    """How finely the batches of the plan are cut, because memory did not hold them whole."""

    parts: int = 1
    """Parts of a batch: 1, 2, 4 and so on."""
    events: list[dict[str, int]] = field(default_factory=list)
    """Each time that memory ended: the step, rows and tokens of the batch, and the rows that were tried next.

    Where rows are packed, lines count as rows.
    """

    def split(self, batches: Sequence[Batch]) -> list[Batch]:
        """The parts that have something to learn, in order."""
        parts = [part for batch in batches for part in split_batch(batch, self.parts)]
        return [part for part in parts if part.loss_tokens]

    def halve(self, failed: Batch, *, number: int, failure: Exception) -> None:
        """Cut twice as finely from here on. Raises TrainingError where the part that failed is a single row."""
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
        if failed.position_ids_BT is None:
            message = "step %d: out of memory with %s of %d tokens; going on with %d at a time"
            logger.warning(message, number, counted(rows, "row"), tokens, now)
        else:
            message = "step %d: out of memory with %s (%d x %d tokens); going on with half"
            logger.warning(message, number, counted(failed.rows, "packed row"), rows, tokens)
        logger.debug("the device said: %s", failure)

    def state_dict(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return {"parts": self.parts, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; an older one has no state."""
        self.parts, self.events = state.get("parts", 1), list(state.get("events", ()))


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The rows in order in so many batches, or in as many as there are rows; each as wide as its own longest line.

    Lines of packed rows stay whole while there are enough of them; then each is cut between its rows.
    """
    if parts == 1 or batch.rows <= 1:
        return [batch]
    groups = torch.arange(batch.lines).tensor_split(min(parts, batch.lines))
    found = [select_lines(batch, int(group[0]), int(group[-1]) + 1) for group in groups]
    if parts <= batch.lines or batch.position_ids_BT is None:
        return found
    return [part for line in found for part in split_packed_line(line, -(-parts // batch.lines))]


def select_lines(batch: Batch, start: int, end: int) -> Batch:
    """Lines from `start` to before `end`, with the keys of their rows."""
    width = int(batch.lengths_B[start:end].max())
    positions_BT, first, last = batch.position_ids_BT, start, end
    if positions_BT is not None:
        ends_B = row_starts(batch).sum(dim=1).cumsum(0).tolist()
        first, last = ends_B[start - 1] if start else 0, ends_B[end - 1]
        positions_BT = positions_BT[start:end, :width].contiguous()
    return Batch(
        input_ids_BT=batch.input_ids_BT[start:end, :width].contiguous(),
        labels_BT=batch.labels_BT[start:end, :width].contiguous(),
        lengths_B=batch.lengths_B[start:end],
        keys=batch.keys[first:last],
        position_ids_BT=positions_BT,
    )


def row_starts(batch: Batch) -> torch.Tensor:
    """Whether a packed row starts at a token, [B, T]; never in padding."""
    if batch.position_ids_BT is None:
        raise AssertionError("only packed rows have positions")
    columns_T = torch.arange(batch.position_ids_BT.shape[1])
    return (batch.position_ids_BT == 0) & (columns_T < batch.lengths_B[:, None])


def split_packed_line(line: Batch, parts: int) -> list[Batch]:
    """The rows of one line of packed rows, in so many lines, or in as many as there are rows."""
    starts = row_starts(line)[0].nonzero()[:, 0].tolist()
    ends = [*starts[1:], int(line.lengths_B[0])]
    found = []
    for group in torch.arange(line.rows).tensor_split(min(parts, line.rows)):
        first, last = int(group[0]), int(group[-1])
        columns = slice(starts[first], ends[last])
        found.append(
            Batch(
                input_ids_BT=line.input_ids_BT[:, columns].contiguous(),
                labels_BT=line.labels_BT[:, columns].contiguous(),
                lengths_B=line.lengths_B.new_tensor([ends[last] - starts[first]]),
                keys=line.keys[first : last + 1],
                position_ids_BT=None if line.position_ids_BT is None else line.position_ids_BT[:, columns].contiguous(),
            )
        )
    return found


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
    """Forward, backward, clip, change the weights; `step` holds the batches of this rank.

    Where memory ends before the weights change, this rank's part begins again with its batches cut in two, down to one
    row; `splitter` keeps that for the steps to come. Raises DivergenceError before a loss that is not a number does
    harm, TrainingError where memory cannot hold one row, or ends while the weights change, and OtherRankError where
    another rank raised one of them. `stop` is asked whether a person wants an end.
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
        told = process_group.all_gather_object(mine, "the gradients of a step")
        failed = next((rank for rank, one in enumerate(told) if one.failure is not None), None)
        if failed is not None:
            raise (
                failure
                if failure is not None and failed == process_group.rank
                else OtherRankError(f"rank {failed} failed")
            )
        there = [one.has_gradients for one in told]
        norm, full = attempt(partial(clip_and_update, engine, number=number, there=there))
    if full is not None or norm is None:
        raise TrainingError(
            f"step {number}: out of memory while the weights were changed, which may have left them half changed. The "
            "weights of the last checkpoint are unharmed: free memory on the device and start the run again, or begin "
            "a new one with an adapter or optimizer: {type: adamw_8bit}"
        ) from full
    splitter.parts = max(one.parts for one in told)
    splitter.events[known:] = [event for one in told for event in one.events]
    return StepResult(
        loss=sum(one.loss for one in told) / share.loss_tokens,
        gradient_norm=norm,
        stats=share,
        stop=any(one.stop for one in told),
    )


def accumulate_gradients(
    global_batch: GlobalBatch,
    *,
    number: int,
    engine: TrainEngine,
    splitter: MicroBatchSplitter,
    seed: int,
    loss_tokens: int,
) -> float:
    """The sum of the loss over this rank's batches; their gradients stand in the module."""
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
    """The same where the ranks share the weights: each pass is an exchange, and all ranks take as many.

    Raises OutOfStepError where memory ends: no rank can begin its part again alone.
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
    """What dropout and noise of a batch follow from in step number `number`."""
    told = "\0".join((str(seed), str(number), *batch.keys)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=7).digest())


def clip_and_update(engine: TrainEngine, *, number: int, there: Sequence[Sequence[bool]]) -> float:
    """Sum the gradients, clip, look at their norm, and take the step; the norm comes back."""
    engine.all_reduce_gradients(there)
    with communication_errors("the norm of the gradients"):
        norm = engine.clip()
    if not math.isfinite(norm) and engine.accelerator.scaler is None:
        raise DivergenceError(f"step {number}: the norm of the gradients is {norm}")
    engine.optimizer_step(number)
    return norm


def check_losses(sums: list[float], batches: list[Batch], *, number: int) -> None:
    """Raises DivergenceError with the rows of the first loss that is not a number."""
    for total, batch in zip(sums, batches, strict=True):
        if not math.isfinite(total):
            rows = ", ".join(batch.keys[:8]) + (", ..." if batch.rows > 8 else "")
            raise DivergenceError(f"step {number}: the loss is {total} on rows {rows}")


def batch_digest(batch: Batch) -> bytes:
    """Hash of row keys, ids, masks and labels of a batch."""
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
    """A line of log.jsonl."""
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
