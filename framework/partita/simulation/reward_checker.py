"""The checker `reward`: a reward model scores the answers of finished episodes.

It runs between the steps of a rollout and not in the threads of the worlds, because models share the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from partita.data.episode import Episode
from partita.generation.best_of import RewardScore
from partita_schema.errors import ConfigError

KEY = "simulation.checker.model"
METRIC = "answer_reward"
"""Name of the metric with the score of an episode."""


class DialogueReward(Protocol):
    """Scores answers to dialogues."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines a score."""

    def scores_of_dialogues(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[str]
    ) -> Sequence[RewardScore]:
        """Return the score of each answer.

        Args:
            prompts: For each answer, the messages before it, with `role` and `content`.
            answers: The answers.
        """


@dataclass(frozen=True)
class RewardChecker:
    """Judges finished episodes by a reward model."""

    reward: DialogueReward
    turns: Literal["last", "mean"]
    """Which answers of the model count: the last one, or the mean of all."""
    threshold: float
    """Score from which an episode has succeeded."""

    def check(self, episode: Episode) -> None:
        """Write the score of a finished episode to its metrics, verdict, and reward if the world gives none.

        An episode with an answer that has no score fails. One that has failed, or has no answer, is left as it is.
        Raises ConfigError if the reward model reads no dialogues.
        """
        if episode.status == "failed" or not episode.replies:
            return
        counted = episode.replies if self.turns == "mean" else episode.replies[-1:]
        prompts = [
            [{"role": one["role"], "content": one["content"]} for one in episode.messages[: turn.index]]
            for turn in counted
        ]
        try:
            rewards = self.reward.scores_of_dialogues(prompts, [turn.text for turn in counted])
        except ConfigError as error:  # at a key of the reward model's own file
            raise ConfigError([replace(problem, path=KEY) for problem in error.problems]) from None
        values = [reward.value for reward in rewards if reward.value is not None and math.isfinite(reward.value)]
        if len(values) < len(counted):
            reason = next((reward.error for reward in rewards if reward.error), "the reward is not a number")
            episode.end("failed", f"checker: {reason}")
            return
        score = sum(values) / len(values)
        episode.metrics[METRIC] = score
        episode.ok = score >= self.threshold
        if episode.reward is None:
            episode.reward = score
