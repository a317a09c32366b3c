"""The head of scores: one number for two texts, as a cross-encoder predicts it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.nn import functional

from partita.lm.base import Generated
from partita.lm.heads.base import RegressionHead, check_numbers
from partita_trainers.base import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ScoreLoss = Literal["binary_cross_entropy", "squared_error"]
IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class ScoreHead(RegressionHead):
    """A probability, or any number."""

    loss: ScoreLoss = "binary_cross_entropy"
    """What is minimized; the score is a probability with `binary_cross_entropy`."""

    reads_pairs: ClassVar = True

    def describe(self, described: "PretrainedConfig") -> None:
        """Write the head into a transformers config, and for sentence-transformers whether scores are probabilities."""
        super().describe(described)
        if self.loss == "binary_cross_entropy":
            described.problem_type = "multi_label_classification"  # the loss of transformers with this name
        else:
            described.sentence_transformers = {"activation_fn": IDENTITY}

    def losses(self, output: Any, batch: Batch) -> torch.Tensor:
        if self.loss == "squared_error":
            return super().losses(output, batch)
        logits_N: torch.Tensor = output.logits.float()[:, 0]
        targets_N = self.targets(batch, device=logits_N.device)[:, 0]
        return functional.binary_cross_entropy_with_logits(logits_N, targets_N, reduction="none")

    def answers(self, output: Any, batch: Batch) -> list[Generated]:
        """Return the score of each row."""
        scores_N = output.logits.double()[:, 0]
        scores = (scores_N if self.loss == "squared_error" else scores_N.sigmoid()).tolist()
        check_numbers(scores)
        return [Generated((), repr(score), "stop") for score in scores]
