"""The losses of a run: their mean between evaluations, and why one is not finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita_schema.errors import DivergenceError
from partita_trainers.checkpoint import list_checkpoints

if TYPE_CHECKING:
    from partita_trainers.engine import TrainEngine

RISEN = 2.0
"""Times the lowest loss from which on a loss counts as risen."""


@dataclass
class LossHistory:
    """Losses of a run, since it was started or continued."""

    lowest: float = 0.0
    """Lowest loss of a step so far."""
    lowest_step: int = 0
    """Its step; 0 before the first."""
    latest: float = 0.0
    """Loss of the newest step."""
    total: float = 0.0
    """Sum of the losses since the last evaluation ..."""
    steps: int = 0
    """... and their number."""

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step."""
        self.latest = loss
        self.total, self.steps = self.total + loss, self.steps + 1
        if not self.lowest_step or loss < self.lowest:
            self.lowest, self.lowest_step = loss, step

    def take_mean(self) -> float:
        """Return the mean loss since this was last asked; NaN without a step since."""
        mean = self.total / self.steps if self.steps else math.nan
        self.total, self.steps = 0.0, 0
        return mean

    @contextmanager
    def explaining(self, engine: "TrainEngine", *, learning_rate: float, checkpoints: Path) -> Iterator[None]:
        """Add the cause and the fix to a DivergenceError that is raised in this context.

        Args:
            learner: what takes the steps.
            learning_rate: the peak of the schedule.
            checkpoints: folder of the run's checkpoints.
        """
        try:
            yield
        except DivergenceError as error:
            unharmed = " The last checkpoint is not affected." if list_checkpoints(checkpoints) else ""
            advice = self.advice(learning_rate=learning_rate, in_16_bits=engine.uses_half_precision)
            raise DivergenceError(f"{error}. {advice}.{unharmed}") from error

    def advice(self, *, learning_rate: float, in_16_bits: bool) -> str:
        """Return the likely cause and what to write instead, in one sentence without its full stop."""
        lower = f"lower trainer.learning_rate, now {learning_rate:g}"
        if not self.lowest_step:
            precision = "write model_parameters: {dtype: float32} and trainer.mixed_precision: no, or "
            return (
                "No weights were changed yet, so the learning rate is not the cause: "
                f"{precision if in_16_bits else ''}check the weights of base_model and the rows of this step"
            )
        if self.latest > RISEN * self.lowest:
            times = f" {self.latest / self.lowest:,.3g}-fold" if self.lowest > 0 else ""
            return (
                f"The loss rose{times} since step {self.lowest_step} ({self.lowest:.3g} to {self.latest:,.4g}): {lower}"
            )
        precision = ", or write model_parameters: {dtype: float32} and trainer.mixed_precision: no"
        return (
            f"The loss was {self.latest:.3g} a step before and had not risen, so a single step was too large: "
            f"{lower}, or lower trainer.gradient_clipping{precision if in_16_bits else ''}"
        )
