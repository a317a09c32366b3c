"""Which evaluation was the best, and when patience ends.

`partita_schema.metrics` says for each metric whether lower or higher is better. A tie keeps the earlier evaluation, and
a metric that is not a number is never the best.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from partita_schema.errors import ConfigError, Problem
from partita_schema.metrics import direction_of
from partita_trainers.base import Metrics


@dataclass
class Validation:
    """What evaluations during training have shown so far."""

    metric: str
    """Name of the metric that decides."""
    patience: int
    """Evaluations without a better one after which training stops; 0 for never."""
    best: float | None = None
    """Best value so far."""
    best_step: int | None = None
    """Step of it."""
    evaluations_without_improvement: int = 0
    """Evaluations since then."""

    def update(self, metrics: Metrics, *, step: int) -> bool:
        """True when this evaluation is the best one so far.

        Raises ConfigError where the metric is not among them, or does not say which of two checkpoints is better.
        """
        if self.metric not in metrics:
            near = get_close_matches(self.metric, metrics, n=1)
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(sorted(metrics))
            raise ConfigError([Problem("trainer.validation_metric", f"no metric is named {self.metric}; {hint}")])
        better = self._is_better(metrics[self.metric])
        if better:
            self.best, self.best_step, self.evaluations_without_improvement = metrics[self.metric], step, 0
        else:
            self.evaluations_without_improvement += 1
        return better

    def _is_better(self, value: float) -> bool:
        direction = direction_of(self.metric)
        if direction is None:
            message = f"{self.metric} does not say which of two checkpoints is better; write another metric"
            raise ConfigError([Problem("trainer.validation_metric", message)])
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value < self.best if direction == "lower" else value > self.best

    @property
    def should_stop(self) -> bool:
        """Patience has ended."""
        return self.patience > 0 and self.evaluations_without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.best, self.best_step, self.evaluations_without_improvement = (
            state["best"],
            state["best_step"],
            state["evaluations_without_improvement"],
        )
