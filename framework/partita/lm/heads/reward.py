"""The head of a reward model: one number for a prompt with an answer, the score of the answer."""

import json
from typing import Any, ClassVar

import torch

from partita.lm.base import Generated
from partita.lm.heads.base import RegressionHead, check_numbers
from partita_trainers.base import Batch


class RewardHead(RegressionHead):
    """A score of an answer; trained with `partita_trainers.objectives.reward`."""

    scores_answers: ClassVar = True

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        """Raise AssertionError: the loss compares the scores of two answers."""
        raise AssertionError("a reward model is trained with the objective of pairs")

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Raise AssertionError: a row may have several answers."""
        raise AssertionError("the answers of a reward model are those of `score_answers`")


def score_answers(scores_RA: torch.Tensor, counts: list[int]) -> list[Generated]:
    """Return the scores of each row as a JSON array; raise ModelError for NaN.

    Args:
        scores_RA: Scores of the answers of each row.
        counts: Number of answers of each row.
    """
    results = []
    for scores, count in zip(scores_RA.tolist(), counts, strict=True):
        check_numbers(scores[:count])
        results.append(Generated((), json.dumps(scores[:count]), "stop"))
    return results
