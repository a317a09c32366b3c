"""Best checkpoint and early stopping.

`partita_schema.sections.outputs` defines for each metric whether lower or higher is better. On a tie the earlier
evaluation wins, and NaN is never the best.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from partita_schema.common.text import nearest
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.outputs import direction_of
from partita_trainers.base import Metrics

logger = logging.getLogger(__name__)


@dataclass
class BestEvaluation:
    """The best evaluation so far, and how many have followed without a better one."""

    metric: str
    """Name of the metric that selects the best checkpoint."""
    patience: int
    """Evaluations without improvement before training stops; 0 for never."""
    rows: str = ""
    """Hash of the validation rows."""
    best: float | None = None
    """Best value so far."""
    best_step: int | None = None
    """Step of the best value."""
    evaluations_without_improvement: int = 0
    """Evaluations since the best value."""

    def update(self, metrics: Metrics, *, step: int) -> bool:
        """Record an evaluation and return whether it is the best so far.

        Raises ConfigError if the metric is missing, or has no direction in which it improves.
        """
        if self.metric not in metrics:
            near = nearest(self.metric, metrics)
            hint = f"did you mean {' or '.join(near)}?" if near else "there are " + ", ".join(sorted(metrics))
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

    def log(
        self, metrics: Metrics, *, step: int, total_steps: int, training_loss: float | None, improved: bool
    ) -> None:
        """Log an evaluation in one line.

        Args:
            metrics: Metrics of the validation rows.
            step: Steps so far.
            total_steps: Steps of the run.
            training_loss: Mean training loss since the last evaluation.
            improved: Whether the evaluation is the best so far.
        """
        other = "" if self.metric == "loss" else f", {self.metric} {metrics[self.metric]:.4g}"
        earlier = "" if self.best is None else f" (best {self.best:.4g} at step {self.best_step})"
        fields = {
            "event": "evaluation",
            "step": step,
            "total_steps": total_steps,
            "training_loss": training_loss,
            "metrics": dict(metrics),
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
        }
        logger.info(
            "step %d/%d: loss %.4g, validation loss %.4g%s%s",
            *(step, total_steps, training_loss, metrics.get("loss", math.nan), other),
            " (new best)" if improved else earlier,
            extra={"fields": fields},
        )

    @property
    def should_stop(self) -> bool:
        """Whether patience is exhausted."""
        return self.patience > 0 and self.evaluations_without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, unless its values are those of other rows."""
        if state["rows"] != self.rows:
            if state["best"] is not None:
                logger.warning(
                    "the validation rows have changed: the best %s so far, %.4g at step %d, was that of other rows and "
                    "is not compared with new ones",
                    *(self.metric, state["best"], state["best_step"]),
                )
            return
        self.best, self.best_step, self.evaluations_without_improvement = (
            state["best"],
            state["best_step"],
            state["evaluations_without_improvement"],
        )
