"""When to evaluate and save, and the learning rate of each step."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from partita_schema.common.text import counted
from partita_schema.errors import DataError
from partita_schema.sections.optimization import LearningRateScheduler
from partita_schema.sections.trainer import FinetuneTrainer
from partita_schema.training_defaults import DEFAULT_EPOCHS, warmup_steps
from partita_trainers.base import Batches

logger = logging.getLogger(__name__)

UNKNOWN_LENGTH_PARTS = 10
"""Number of evaluations and checkpoints in a run over data of unknown length."""
NEVER = 10**12
"""Steps that no run takes, in place of infinitely many."""
WSD_DECAY = 0.1  # fraction of steps in the decay phase of warmup-stable-decay (Hu et al. 2024, section 4)


@dataclass(frozen=True)
class Schedule:
    """When to evaluate and save, in optimizer steps."""

    total: int
    """Steps of the whole run."""
    evaluate_every: int | None
    """Steps between evaluations; None for no evaluations."""
    checkpoint_every: int | None
    """Steps between checkpoints; None for one at the end only."""

    def evaluation_is_due(self, step: int) -> bool:
        """Return whether to evaluate after `step`."""
        return self.evaluate_every is not None and (step % self.evaluate_every == 0 or step == self.total)

    def checkpoint_is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint after `step`."""
        return step == self.total or (self.checkpoint_every is not None and step % self.checkpoint_every == 0)


class CheckpointTimer:
    """Tells when the last checkpoint has become too old."""

    def __init__(self, minutes: float | None) -> None:
        """Start the time of the first checkpoint.

        Args:
            minutes: Age at which another checkpoint is due; None for never.
        """
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        """Start the time of the next checkpoint."""
        self.started = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the time is over."""
        return self.minutes is not None and time.monotonic() - self.started >= 60 * self.minutes


def planned_steps(config: FinetuneTrainer, batches: Batches) -> int | None:
    """Return the number of optimizer steps of a run; None if only the length of the data limits it, and is unknown."""
    if batches.steps_per_epoch is None or (config.epochs is None and config.max_steps is not None):
        return config.max_steps
    by_epochs = batches.total_steps(DEFAULT_EPOCHS if config.epochs is None else config.epochs)
    return by_epochs if config.max_steps is None else min(config.max_steps, by_epochs)


def plan_schedule(config: FinetuneTrainer, *, batches: Batches, splits: Sequence[str]) -> Schedule:
    """Plan the total steps, and the steps between evaluations and between checkpoints.

    If the length of the data is unknown, each interval defaults to a tenth of the run. Raises DataError if the end of
    the run is then undefined.
    """
    total = planned_steps(config, batches)
    if total is None:
        raise DataError("the data's length is not known; write trainer.max_steps, the number of optimizer steps")

    def steps_between(times_per_epoch: float) -> int:
        per_epoch = batches.steps_per_epoch
        steps = total / UNKNOWN_LENGTH_PARTS if per_epoch is None else per_epoch / times_per_epoch
        return max(1, round(min(steps, NEVER)))

    warmup = config.learning_rate_scheduler.warmup_steps
    if warmup is not None and warmup > total:
        logger.warning(
            "trainer.learning_rate_scheduler.warmup_steps is %s and the run has %s: the warmup is shortened to the run",
            f"{warmup:,}",
            counted(total, "step"),
        )
    evaluate = None
    if "validation" in splits and not config.skip_all_evaluation:
        evaluate = config.steps_per_evaluation or steps_between(config.evaluations_per_epoch)
    checkpoint = config.steps_per_checkpoint
    if checkpoint is None and config.checkpoints_per_epoch > 0:
        checkpoint = steps_between(config.checkpoints_per_epoch)
    return Schedule(total=total, evaluate_every=evaluate, checkpoint_every=checkpoint)


def learning_rate_share(scheduler: LearningRateScheduler, *, step: int, total_steps: int) -> float:
    """Return the fraction of the peak learning rate at `step`, from 1 to `total_steps`."""
    warmup = warmup_steps(scheduler, total_steps)
    if step <= warmup:
        return step / warmup
    floor = scheduler.min_ratio if scheduler.min_ratio is not None else 0.1 if scheduler.decay == "cosine" else 0.0
    after, span = step - warmup, max(1, total_steps - warmup)
    # A floor above 0 is reached in the last step, and 0 after it: a step with a rate of 0 would change nothing.
    progress = after / (span if floor else span + 1)
    match scheduler.decay:
        case "none" | "constant":
            return 1.0
        case "linear":
            shape = 1 - progress
        case "cosine":
            shape = (1 + math.cos(math.pi * progress)) / 2
        case "wsd":
            shape = min(1.0, (1 - progress) / WSD_DECAY)
        case "inverse_sqrt":
            # Without warmup, the first step has the peak.
            start, since = (warmup, after) if warmup else (1, after - 1)
            return max(floor, math.sqrt(start / (start + since)))
        case "exponential":
            every = scheduler.decay_steps or max(1, total_steps // 100)
            rate = scheduler.decay_rate if scheduler.decay_rate is not None else 0.96
            return max(floor, math.pow(rate, after / every))
        case _:
            assert_never(scheduler.decay)
    return floor + (1 - floor) * shape
