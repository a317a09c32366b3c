"""Which evaluation was the best, and when patience ends.

Lower is better for losses and errors, higher for the rest.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from partita_schema.errors import ConfigError, Problem
from partita_trainers.base import Metrics

LOWER_IS_BETTER = ("loss", "mae", "rmse", "mean_absolute_error", "root_mean_squared_error", "invalid")


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
    waited: int = 0
    """Evaluations since then."""

    def see(self, metrics: Metrics, *, step: int) -> bool:
        """True when this evaluation is the best one so far. Raises ConfigError where the metric is not among them."""
        if self.metric not in metrics:
            near = get_close_matches(self.metric, metrics, n=1)
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(sorted(metrics))
            raise ConfigError([Problem("trainer.validation_metric", f"no metric is named {self.metric}; {hint}")])
        value = metrics[self.metric]
        lower = self.metric.rsplit(".", 1)[-1] in LOWER_IS_BETTER
        better = value == value and (self.best is None or (value < self.best if lower else value > self.best))
        if better:
            self.best, self.best_step, self.waited = value, step, 0
        else:
            self.waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Patience has ended."""
        return self.patience > 0 and self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return asdict(self)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
