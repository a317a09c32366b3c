"""How several answers to a row are drawn and chosen, as far as the file shows it; for `partita explain`.

This module imports neither torch nor transformers.
"""

from dataclasses import dataclass
from typing import Any

from partita_schema.config import Config


@dataclass(frozen=True)
class BestOfPlan:
    """How the answers of `generation.best_of` are drawn."""

    samples: int
    """Number of answers to each row."""
    reward: str
    """The reward model that chooses one."""
    prefills: int
    """How often the prompt of a row is computed, where the model supports continuous batching."""
    reason: str
    """Why it is computed for each answer, or where it is not computed once."""
    trains: bool
    """Whether the file also trains."""

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {"samples": self.samples, "reward": self.reward, "prefills": self.prefills, "reason": self.reason}

    def lines(self) -> list[str]:
        """Return the plan in words."""
        serves = f"one prefill of a prompt serves all {self.samples} answers to it, {self.reason}"
        if self.prefills > 1:
            serves = f"each prompt is computed {self.prefills} times, once for each answer: {self.reason}"
        verbs = "predict and evaluate draw" if self.trains else "each row gets"
        lines = [f"{verbs} {self.samples} answers, and the reward model {self.reward} chooses one", serves]
        return [*lines, "answers that training generates are not chosen"] if self.trains else lines


def plan_best_of(config: Config) -> BestOfPlan | None:
    """Return how several answers to a row are drawn; None if there is one."""
    generation = config.generation
    if generation.best_of is None or generation.reward is None:
        return None
    prefills, reason = generation.best_of, "generation.slots is false"
    if not config.backend.loads_model:
        reason = "a server gets each answer as a request"
    elif generation.slots:
        prefills, reason = 1, "where the model supports continuous batching"
    return BestOfPlan(generation.best_of, generation.reward, prefills, reason, config.trains)
