"""The learning rate of each step, as a function of the step alone."""

import math

from partita_schema.trainer import LearningRateScheduler

WSD_DECAY = 0.1  # share of the steps in which warmup-stable-decay comes down (Hu et al. 2024, section 4)


def warmup_steps(scheduler: LearningRateScheduler, total_steps: int) -> int:
    """Steps of the warm-up: as the file says, else 3 % and at least 5 where there are 50 steps."""
    if scheduler.warmup_steps is not None:
        return min(scheduler.warmup_steps, total_steps)
    if scheduler.warmup_fraction is not None:
        return round(scheduler.warmup_fraction * total_steps)
    least = 5 if total_steps >= 50 else 0
    return max(least, round(0.03 * total_steps))


def learning_rate_share(scheduler: LearningRateScheduler, *, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at `step`, from 1 to `total_steps`."""
    warmup = warmup_steps(scheduler, total_steps)
    if step <= warmup:
        return step / warmup
    floor = scheduler.min_ratio if scheduler.min_ratio is not None else 0.1 if scheduler.decay == "cosine" else 0.0
    after, span = step - warmup, max(1, total_steps - warmup)
    progress = after / span
    if scheduler.decay in ("none", "constant"):
        return 1.0
    if scheduler.decay == "linear":
        shape = 1 - progress
    elif scheduler.decay == "cosine":
        shape = (1 + math.cos(math.pi * progress)) / 2
    elif scheduler.decay == "wsd":
        shape = min(1.0, (1 - progress) / WSD_DECAY)
    elif scheduler.decay == "inverse_sqrt":
        start = max(1, warmup)
        return max(floor, math.sqrt(start / (start + after)))
    else:
        every = scheduler.decay_steps or max(1, total_steps // 100)
        rate = scheduler.decay_rate if scheduler.decay_rate is not None else 0.96
        return max(floor, math.pow(rate, after / every))
    return floor + (1 - floor) * shape
