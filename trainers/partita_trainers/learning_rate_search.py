"""Learning rate range test (Smith 2015, section 3.3): raise the rate each step until the loss diverges.

Weights, optimizers, random states and the data position are restored afterwards.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from partita_schema.errors import DivergenceError, OtherRankError, TrainingError
from partita_trainers.base import Batches, GlobalBatch, LanguageModel
from partita_trainers.checkpoints.preserved_state import preserved_state
from partita_trainers.steps.step import open_steps

LOWEST, HIGHEST, STEPS = 1e-6, 0.5, 60
SMOOTHING = 0.8
DIVERGED = 1.5  # the test ends at this multiple of the lowest smoothed loss
BELOW_MINIMUM = 10.0  # the rate of the lowest loss is on the edge of divergence: a tenth of it is safe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearningRateSearch:
    """A range test."""

    learning_rate: float
    """The peak learning rate that it suggests."""
    rates: Sequence[float]
    """The rates that were tried, in order."""
    losses: Sequence[float]
    """The loss of the step with each of them."""


def find_learning_rate(
    lm: LanguageModel, batches: Batches, *, try_step: Callable[[GlobalBatch, float], float]
) -> LearningRateSearch:
    """Run the range test. `try_step(step, learning_rate)` takes a step and returns its loss."""
    rates, losses = list[float](), list[float]()
    with preserved_state(lm), open_steps(batches) as steps:
        for number, step in enumerate(islice(steps, STEPS)):
            rate = LOWEST * (HIGHEST / LOWEST) ** (number / (STEPS - 1))
            try:
                loss = try_step(step, rate)
            except (DivergenceError, OtherRankError) as error:
                if not isinstance(error, DivergenceError) and not isinstance(error.__cause__, DivergenceError):
                    raise
                break
            rates.append(rate)
            losses.append(loss)
            if loss > 4 * losses[0]:
                break
    suggested = suggest(rates, losses)
    logger.info("learning rate %.3g, from a range test of %d steps", suggested, len(rates))
    return LearningRateSearch(suggested, rates, losses)


def suggest(rates: list[float], losses: list[float]) -> float:
    """Return a tenth of the rate with the lowest smoothed loss before divergence, within the tested range."""
    if not rates:
        raise TrainingError("the range test saw no finite loss; write trainer.learning_rate as a number")
    average, best, best_rate = 0.0, math.inf, rates[0]
    for number, (rate, loss) in enumerate(zip(rates, losses, strict=True), start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING**number)
        if smoothed < best:
            best, best_rate = smoothed, rate
        elif smoothed > DIVERGED * best:
            break
    return max(LOWEST, best_rate / BELOW_MINIMUM)
