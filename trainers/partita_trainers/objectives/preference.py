"""Training on pairs of a chosen and a rejected answer: DPO with its variants, ORPO and SimPO.

A row of data is a prompt with two branches, the answers, and is computed in one pass; see `partita_trainers.Batch`.
Losses and metrics are sums over pairs, divided by the pairs of the step, so that they depend neither on the number of
micro-batches nor on the number of ranks.

Shapes: R rows of a batch, A = 2 answers of a row, the chosen one first, P pairs with a loss.
"""

from collections.abc import Iterable, Mapping

import torch

from partita_schema.sections.objectives import DpoLoss, OrpoLoss, SimpoLoss
from partita_schema.sections.trainer import PreferenceTrainer
from partita_trainers.base import Batch, ProbeContext
from partita_trainers.device_copies import to_device
from partita_trainers.finetune import Finetune
from partita_trainers.finetune_run import FinetuneRun
from partita_trainers.objective import ObjectiveContext, ObjectiveRow, WeightedMean
from partita_trainers.objectives.pair_losses import Pairs, compares_means, pair_function
from partita_trainers.objectives.prepare_references import is_in_step, prepare_references, with_copy
from partita_trainers.objectives.references import (
    References,
    answer_sums,
    rows_with_loss,
)
from partita_trainers.training_probe import TrainingProbe

ROW_VALUES = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
"""Values of a pair from which all its metrics follow."""


class PairObjective:
    """A loss on pairs, averaged over the pairs of a step, with metrics under the names of TRL."""

    branched = True
    """Rows have branches."""

    def __init__(self, loss: DpoLoss | OrpoLoss | SimpoLoss) -> None:
        self.beta = loss.beta
        self.function, self.compares_means = pair_function(loss), compares_means(loss)
        self.references = References(answers=2) if isinstance(loss, DpoLoss) else None
        self.last: tuple[torch.Tensor, Mapping[str, torch.Tensor]] | None = None
        """The loss and the values of each pair of the last batch."""

    def denominator(self, batch: Batch) -> float:
        """Return the number of pairs."""
        return len(rows_with_loss(batch))

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the references that are not known yet."""
        if self.references is not None:
            self.references.compute(context, batches)

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        """Return the sum of the losses of the pairs, and the metrics of `pair_metrics`."""
        sums = answer_sums(context.token_log_probs(batch), batch, answers=2)
        if self.references is None:
            references_RA = torch.zeros_like(sums.log_probs_RA)
        else:
            references_RA = self.references.of(batch, like=sums.log_probs_RA)
        with_loss = to_device(rows_with_loss(batch), references_RA.device)
        pairs = Pairs(
            chosen_P=sums.log_probs_RA[with_loss, 0],
            rejected_P=sums.log_probs_RA[with_loss, 1],
            chosen_tokens_P=sums.tokens_RA[with_loss, 0],
            rejected_tokens_P=sums.tokens_RA[with_loss, 1],
            reference_chosen_P=references_RA[with_loss, 0],
            reference_rejected_P=references_RA[with_loss, 1],
        )
        losses_P = self.function(pairs)
        total = losses_P.sum().float()
        with torch.no_grad():
            values = pair_values(
                pairs, beta=self.beta, has_reference=self.references is not None, means=self.compares_means
            )
            self.last = losses_P.detach(), {name: values[name].detach() for name in ROW_VALUES}
            return total, pair_metrics(values)

    def reference_batches(self, context: ObjectiveContext, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches: the losses need the log-probabilities of both answers."""
        return batches

    def objective_rows(self, batch: Batch) -> list[ObjectiveRow]:
        """Return the loss of each pair, and its rewards and log-probabilities."""
        assert self.last is not None, "rows have results after their loss"
        losses_P, values = self.last
        columns = [values[name].tolist() for name in ROW_VALUES]
        rows = (dict(zip(ROW_VALUES, row, strict=True)) for row in zip(*columns, strict=True))
        return [ObjectiveRow(loss, row) for loss, row in zip(losses_P.tolist(), rows, strict=True)]


def pair_values(pairs: Pairs, *, beta: float, has_reference: bool, means: bool) -> dict[str, torch.Tensor]:
    """Return a value of each pair, by the name of the metric that is its mean, as TRL names it.

    The reward of an answer is beta times what the loss compares: its log-probability, with a reference relative to it,
    and with `means` per token. With a reference, `logps/` are log-probabilities of whole answers, and `chosen_falls` is
    the share of chosen answers that are less likely than before training. Without one, `logps/` are means per token.

    Args:
        pairs: The pairs.
        beta: Factor of the rewards.
        has_reference: Whether the loss compares with a reference.
        means: Whether the loss compares means per token.
    """
    chosen_P, rejected_P = pairs.chosen_P, pairs.rejected_P
    if not has_reference:
        chosen_P, rejected_P = pairs.mean_chosen_P, pairs.mean_rejected_P
    chosen_rewards_P = beta * (pairs.mean_chosen_ratio_P if means else pairs.chosen_ratio_P)
    rejected_rewards_P = beta * (pairs.mean_rejected_ratio_P if means else pairs.rejected_ratio_P)
    values = {
        "rewards/chosen": chosen_rewards_P,
        "rewards/rejected": rejected_rewards_P,
        "rewards/accuracies": chosen_rewards_P > rejected_rewards_P,
        "rewards/margins": chosen_rewards_P - rejected_rewards_P,
        "logps/chosen": chosen_P,
        "logps/rejected": rejected_P,
    }
    if has_reference:
        values["chosen_falls"] = pairs.chosen_ratio_P < 0
    return values


def pair_metrics(values: Mapping[str, torch.Tensor]) -> dict[str, WeightedMean]:
    """Return the means over pairs of the values of `pair_values`."""
    return {name: WeightedMean(values_P.sum(), len(values_P)) for name, values_P in values.items()}


class Preference(Finetune):
    """Trains on pairs of a chosen and a rejected answer."""

    config: PreferenceTrainer
    objective: PairObjective

    def __init__(self, config: PreferenceTrainer) -> None:
        super().__init__(config, objective=PairObjective(config.loss))

    def _before_training(self, run: FinetuneRun) -> None:
        """Compute the references, or keep what computing them in steps needs."""
        if self.objective.references is not None:
            prepare_references(run, self.objective.references, when=self.config.references)

    def _after_training(self) -> None:
        """Compare the finished model with references in its precision."""
        if self.objective.references is not None:
            self.objective.references.end_training()

    def probe(self, context: ProbeContext) -> TrainingProbe:
        """Return a probe as in fine-tuning, with the copy of the weights that references in steps need."""
        in_step = is_in_step(self.config.references, streamed=context.streamed)
        probe = super().probe(context)
        return with_copy(probe) if in_step and self.objective.references is not None else probe
