"""The losses of a run: their mean between evaluations, and the likely cause of a non-finite one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from partita_schema.errors import DivergenceError
from partita_trainers.checkpoints.checkpoint import list_checkpoints

if TYPE_CHECKING:
    from partita_trainers.engine import TrainEngine

RISEN = 2.0
"""A loss above this multiple of the lowest one counts as risen."""


@dataclass
class LossHistory:
    """Losses of a run since it was started or resumed."""

    lowest: float = 0.0
    """Lowest loss of a step so far."""
    lowest_step: int = 0
    """Step of the lowest loss; 0 before the first step."""
    latest: float = 0.0
    """Loss of the latest step."""
    total: float = 0.0
    """Sum of the losses since the last evaluation."""
    steps: int = 0
    """Number of steps since the last evaluation."""

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step."""
        self.latest = loss
        self.total, self.steps = self.total + loss, self.steps + 1
        if not self.lowest_step or loss < self.lowest:
            self.lowest, self.lowest_step = loss, step

    def take_mean(self) -> float:
        """Return the mean loss since the last call; NaN if there were no steps."""
        mean = self.total / self.steps if self.steps else math.nan
        self.total, self.steps = 0.0, 0
        return mean

    @contextmanager
    def explaining(self, engine: "TrainEngine", *, learning_rate: float, checkpoints: Path) -> Iterator[None]:
        """Add the cause and the fix to a DivergenceError raised inside the context.

        Args:
            engine: Takes the steps.
            learning_rate: Peak of the schedule.
            checkpoints: Folder of the run's checkpoints.
        """
        try:
            yield
        except DivergenceError as error:
            unharmed = " The last checkpoint is not affected." if list_checkpoints(checkpoints) else ""
            advice = self.advice(learning_rate=learning_rate, in_16_bits=engine.uses_half_precision)
            raise DivergenceError(f"{error}. {advice}.{unharmed}") from error

    def advice(self, *, learning_rate: float, in_16_bits: bool) -> str:
        """Return the likely cause and the fix, as one sentence without its full stop."""
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
            f"The loss was {self.latest:.3g} one step earlier and had not risen, so a single step was too large: "
            f"{lower}, or lower trainer.gradient_clipping{precision if in_16_bits else ''}"
        )
