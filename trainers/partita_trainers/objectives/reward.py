"""Training of a reward model on pairs of a chosen and a rejected answer (Ouyang et al. 2022, arXiv 2203.02155).

The loss of a pair is -logsigmoid(s_c - s_r - margin) + center (s_c + s_r)^2, with the scores s_c and s_r of both
answers and the margin of the data, or 0 (Llama 2, arXiv 2307.09288, equation 2). Losses and metrics are sums over
pairs, divided by the pairs of the step, so that they depend neither on the number of micro-batches nor on the number
of ranks.

Shapes: R rows of a batch, P pairs: the rows that have loss tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, cast

import torch
from torch.nn.functional import logsigmoid

from partita_schema.sections.trainer import RewardTrainer
from partita_trainers.base import Batch, LanguageModel
from partita_trainers.device_copies import to_device
from partita_trainers.finetune import Finetune
from partita_trainers.objective import ObjectiveContext, ObjectiveRow, WeightedMean
from partita_trainers.objectives.references import rows_with_loss


class ScoringModel(LanguageModel, Protocol):
    """A model that scores answers."""

    def answer_scores(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scores of both answers of each row, the chosen one first, float32 [R, 2].

        `module` is `self.module`, or a wrapper of it.
        """


def reward_loss(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, margin_P: torch.Tensor | float = 0.0, center: float = 0.0
) -> torch.Tensor:
    """Return the loss of each pair.

    The loss without `center` does not change if a number is added to all scores. The squared sum of both scores keeps
    them near 0 (Eisenstein et al. 2023, arXiv 2312.09244, section 3.1).

    Args:
        chosen_P: Scores of the chosen answers.
        rejected_P: Scores of the rejected answers.
        margin_P: By how much the chosen score should be higher.
        center: Weight of the squared sum of both scores.
    """
    loss_P = -logsigmoid(chosen_P - rejected_P - margin_P)
    return loss_P + center * (chosen_P + rejected_P).square() if center else loss_P


class RewardObjective:
    """The loss of a reward model, averaged over the pairs of a step, with metrics under the names of TRL's DPO."""

    branched = True
    """Rows have branches."""

    def __init__(self, *, center: float = 0.0) -> None:
        """Create the objective; `center` is the weight of the squared sum of both scores."""
        self.center = center
        self._rows: list[ObjectiveRow] = []

    def denominator(self, batch: Batch) -> float:
        """Return the number of pairs."""
        return len(rows_with_loss(batch))

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Do nothing: the loss of a pair depends on its row only."""

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        """Return the sum of the losses of the pairs, and means over pairs.

        `rewards/chosen` and `rewards/rejected` are scores, `rewards/margins` their difference, and `rewards/accuracies`
        the share of pairs whose chosen answer has the higher score.
        """
        scores_RA = cast(ScoringModel, context.lm).answer_scores(context.module, batch)
        with_loss = rows_with_loss(batch)
        chosen_P, rejected_P = scores_RA[to_device(with_loss, scores_RA.device)].unbind(1)
        margin_P: torch.Tensor | float = 0.0
        if batch.row_values_NK is not None:
            margin_P = to_device(batch.row_values_NK[with_loss, 0], scores_RA.device)
        loss_P = reward_loss(chosen_P, rejected_P, margin_P=margin_P, center=self.center)
        total = loss_P.sum()
        with torch.no_grad():
            if not loss_P.requires_grad:  # only evaluations read them
                self._rows = rows_of(loss_P, chosen_P, rejected_P)
            values = {
                "rewards/accuracies": chosen_P > rejected_P,
                "rewards/margins": chosen_P - rejected_P,
                "rewards/chosen": chosen_P,
                "rewards/rejected": rejected_P,
            }
            return total, {name: WeightedMean(one_P.sum(), len(one_P)) for name, one_P in values.items()}

    def objective_rows(self, batch: Batch) -> list[ObjectiveRow]:
        """Return the loss of each pair, and the scores of both answers."""
        return self._rows


def rows_of(loss_P: torch.Tensor, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> list[ObjectiveRow]:
    """Return the results of pairs."""
    columns = loss_P.tolist(), chosen_P.tolist(), rejected_P.tolist()
    return [
        ObjectiveRow(loss, {"rewards/chosen": chosen, "rewards/rejected": rejected})
        for loss, chosen, rejected in zip(*columns, strict=True)
    ]


class Reward(Finetune):
    """Trains a model to score answers."""

    config: RewardTrainer
    objective: RewardObjective

    def __init__(self, config: RewardTrainer) -> None:
        super().__init__(config, objective=RewardObjective(center=config.center))
