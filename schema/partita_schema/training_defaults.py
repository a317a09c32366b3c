"""Defaults of a training run that depend on more than one key: learning rate, warm-up steps and epochs."""

from typing import NamedTuple

from partita_schema.config import Config
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.optimization import LearningRateScheduler

DEFAULT_EPOCHS = 3.0
"""Epochs of a run that sets neither epochs nor max_steps."""


class LearningRates(NamedTuple):
    """Default learning rates, by what is trained."""

    adapter: float
    new: float
    pretrained: float


LEARNING_RATES = {
    "finetune": LearningRates(adapter=2e-4, new=1e-3, pretrained=2e-5),
    "preference": LearningRates(adapter=1e-5, new=1e-4, pretrained=1e-6),
    "kto": LearningRates(adapter=1e-5, new=1e-4, pretrained=1e-6),
    "reward": LearningRates(adapter=1e-4, new=1e-3, pretrained=1e-5),
}
"""Default learning rates by trainer; those of fine-tuning for other trainers."""


def default_learning_rate(config: Config) -> tuple[float, str]:
    """Return the peak learning rate of a file that sets none, and what it is the default for."""
    rates = LEARNING_RATES.get(config.trainer.type, LEARNING_RATES["finetune"])
    if config.adapter is not None:
        return rates.adapter, "an adapter"
    is_new = isinstance(config.base_model, ScratchModel)
    return (rates.new, "a new model") if is_new else (rates.pretrained, "a pretrained model")


def warmup_steps(scheduler: LearningRateScheduler, total_steps: int) -> int:
    """Return the warm-up steps: as configured, else 3 % of the steps, and at least 5 in runs of 50 steps or more."""
    if scheduler.warmup_steps is not None:
        return min(scheduler.warmup_steps, total_steps)
    if scheduler.warmup_fraction is not None:
        return round(scheduler.warmup_fraction * total_steps)
    least = 5 if total_steps >= 50 else 0
    return max(least, round(0.03 * total_steps))
