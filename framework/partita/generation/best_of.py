"""Best of n: draw several answers to each row, and keep the one with the highest reward."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from partita.generation.prompts import PromptRows
from partita.generation.requests import RowResult, stop_if_broken
from partita.lm.base import Generated
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.device_errors import attempt

logger = logging.getLogger(__name__)

NOT_A_NUMBER = "the reward is not a number"
TOO_LARGE = "the reward of this answer does not fit in memory even alone"


class RewardScore(Protocol):
    """The score of an answer."""

    @property
    def value(self) -> float | None:
        """The score, higher is better; None if there is none."""

    @property
    def error(self) -> str | None:
        """Why there is none."""


class RewardScorer(Protocol):
    """Scores the answers to a row."""

    @property
    def config(self) -> Config:
        """The file of the model."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines a score."""

    def scores(self, row: Mapping[str, Any], answers: Sequence[str]) -> Sequence[RewardScore]:
        """Return the scores of several answers to a row, which is a dictionary by column."""


@dataclass(frozen=True)
class BestOf:
    """How many answers are drawn for a row, and what chooses among them."""

    num_samples: int
    reward: RewardScorer
    keep_samples: bool = False
    """Whether results hold all answers."""


class AnswerChooser:
    """Collects the samples of rows, and chooses the best one of each row once all are there.

    A row is scored by itself as soon as it is complete. Its rewards then depend on no other row, and a killed job has
    all complete rows in its journal.
    """

    def __init__(self, best_of: BestOf, rows: PromptRows) -> None:
        """Set up the choice; the reward model reads the prompt from `rows`."""
        self.best_of, self.rows = best_of, rows
        self.waiting: dict[int, dict[int, RowResult]] = {}
        """Samples of rows of which some are missing, by row and number."""
        self.num_unscored = 0
        """Number of answers without a reward."""
        self.reason = ""
        """Why the last of them has none."""

    def take(self, samples: Sequence[RowResult]) -> list[RowResult]:
        """Take samples, numbered as in `SampledPrompts`; return the results of rows that are complete."""
        results: list[RowResult] = []
        for sample in samples:
            row, number = divmod(sample.row, self.best_of.num_samples)
            of_row = self.waiting.setdefault(row, {})
            of_row[number] = sample
            if len(of_row) == self.best_of.num_samples:
                del self.waiting[row]
                results.append(self.choose(row, [of_row[number] for number in range(self.best_of.num_samples)]))
        return results

    def log_unscored(self) -> None:
        """Log how many answers have no reward."""
        if self.num_unscored:
            logger.warning(
                "%s without a reward, which cannot be chosen; the last one because: %s",
                counted(self.num_unscored, "answer"),
                self.reason,
            )

    def choose(self, row: int, samples: Sequence[RowResult]) -> RowResult:
        """Return the result of a row with all its samples: the one with the highest reward, the first of a tie."""
        answers = [sample.generated for sample in samples if sample.generated is not None]
        if len(answers) < len(samples):
            return RowResult(row, None, next(sample.error for sample in samples if sample.generated is None))
        texts = list(dict.fromkeys(answer.text for answer in answers))
        scores = dict(zip(texts, self.scores(self.rows.get([row])[0], texts), strict=True))
        return self.best(row, answers, [scores[answer.text] for answer in answers])

    def best(self, row: int, samples: Sequence[Generated], scores: Sequence[float | str]) -> RowResult:
        """Return the result of a row.

        Args:
            row: Index of the row.
            samples: Its answers.
            scores: Reward of each answer, or why it has none.
        """
        reasons = [score for score in scores if isinstance(score, str)]
        if reasons:
            self.num_unscored, self.reason = self.num_unscored + len(reasons), reasons[-1]
        rewards = [-math.inf if isinstance(score, str) else score for score in scores]
        best = max(range(len(samples)), key=rewards.__getitem__)
        if len(reasons) == len(samples):
            return RowResult(row, None, f"no answer has a reward: {reasons[0]}")
        kept = None
        if self.best_of.keep_samples:
            kept = tuple(
                {"text": one.text, "reward": None if isinstance(score, str) else score}
                for one, score in zip(samples, scores, strict=True)
            )
        return RowResult(row, samples[best], reward=rewards[best], samples=kept)

    def scores(self, row: Mapping[str, Any], answers: Sequence[str]) -> list[float | str]:
        """Return the reward of each answer to a row, or why it has none; half of them at a time if memory runs out."""
        reward = self.best_of.reward
        try:
            scores, failure = attempt(lambda: reward.scores(row, answers))
        except OutOfMemory as error:  # a single request does not fit
            scores, failure = None, error
        except Exception as error:
            stop_if_broken(error)
            raise
        if scores is not None:
            return [
                score.value if score.value is not None and math.isfinite(score.value) else score.error or NOT_A_NUMBER
                for score in scores
            ]
        logger.debug("device error: %s", failure)
        if len(answers) == 1:
            return [TOO_LARGE]
        middle = (len(answers) + 1) // 2
        logger.info("out of memory with the rewards of %s: continuing with %s", counted(len(answers), "answer"), middle)
        return [*self.scores(row, answers[:middle]), *self.scores(row, answers[middle:])]
