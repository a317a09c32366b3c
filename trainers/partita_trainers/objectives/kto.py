"""Training on single answers that are labelled good or bad (KTO, Ethayarajh et al. 2024, arXiv 2402.01306).

The KL term z of a step is the mean of L - R over mismatched pairs of all its rows, on all ranks: the prompt of a row
with the answer of the row before it, in the order of keys. Copies of the row are passed over. It is computed in
`prepare`, so that it depends neither on the number of micro-batches nor on the number of ranks.

Shapes: R rows of a batch, A answers of a row (here 1), G good or bad rows of a batch, S rows of a step.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple, cast

import torch

from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.sections.trainer import KtoTrainer
from partita_trainers.base import Batch, IndexedBatches, ProbeContext
from partita_trainers.device_copies import to_device
from partita_trainers.finetune import Finetune
from partita_trainers.finetune_run import FinetuneRun
from partita_trainers.objective import ObjectiveContext, ObjectiveRow, WeightedMean
from partita_trainers.objectives.prepare_references import prepare_references, with_copy
from partita_trainers.objectives.references import (
    ReferenceModel,
    References,
    answer_sums,
    row_columns,
    rows_with_loss,
)
from partita_trainers.steps.step import open_steps
from partita_trainers.training_probe import TrainingProbe

logger = logging.getLogger(__name__)

ANSWERS_OF_ONE_LABEL = 1000
"""Number of answers of a stream after which training stops if all of them have the same label."""


@dataclass(frozen=True, order=True)
class LabelledRow:
    """A row of a step, as ranks exchange it."""

    key: str
    ids: tuple[int, ...]
    prompt_tokens: int
    """Tokens before the answer."""
    labels: tuple[int, ...]
    """The ids of the loss tokens and -100 elsewhere."""
    is_good: bool


class StepRows(NamedTuple):
    """The rows of a step."""

    rows: list[LabelledRow]
    """Those of all ranks, in order."""
    indices: list[int]
    """Indices in `rows` of the rows of this rank, in its order."""

    @classmethod
    def of(cls, of_ranks: Sequence[Sequence[LabelledRow]], *, rank: int) -> "StepRows":
        """Return the rows of all ranks in order, with the indices of those of `rank`."""
        ordered = sorted((row, owner, index) for owner, rows in enumerate(of_ranks) for index, row in enumerate(rows))
        indices = {local: index for index, (_, owner, local) in enumerate(ordered) if owner == rank}
        return cls([row for row, _, _ in ordered], [indices[index] for index in range(len(indices))])


@dataclass(frozen=True)
class StepTotals:
    """What the losses of a step depend on."""

    kl: torch.Tensor | float = 0.0
    """z, at least 0: a scalar on the device that is not read before the end of the step. 0 in a step of one row and its
    copies, which has no mismatched pair, and before the first step."""
    good: int = 0
    """Number of good answers."""
    bad: int = 0


def kto(
    ratio_R: torch.Tensor,
    is_good_R: torch.Tensor,
    *,
    kl: torch.Tensor | float,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """Return the loss of each answer (arXiv 2402.01306, equations 7 and 8).

    w_d (1 - sigmoid(beta (L - R - z))) for a good answer and w_u (1 - sigmoid(beta (z - L + R))) for a bad one.

    Args:
        ratio_R: L - R, the log-probability of each answer relative to the reference.
        is_good_R: Which answers are good, bool.
        kl: z.
        beta: Strength of the tie to the reference.
        weights: w_d and w_u, of good and of bad answers.
    """
    good_R = weights[0] * (1 - torch.sigmoid(beta * (ratio_R - kl)))
    bad_R = weights[1] * (1 - torch.sigmoid(beta * (kl - ratio_R)))
    return torch.where(is_good_R, good_R, bad_R)


class KtoObjective:
    """The loss of KTO, averaged over the answers of a step, with metrics under the names of TRL."""

    def __init__(self, config: KtoTrainer) -> None:
        self.beta, self.desirable_weight = config.beta, config.desirable_weight
        self.undesirable_weight = 1.0 if config.undesirable_weight == "auto" else config.undesirable_weight
        self.references = References(answers=1)
        self.step = StepTotals()
        self.exchanged: tuple[list[LabelledRow], StepRows] | None = None
        self.own_ratios_R: torch.Tensor | None = None
        """The ratios of this rank's mismatched answers, as `ratios` returns them; None if there are none."""
        self.labels: Counter[bool] | None = None
        """Number of good and of bad answers that training has read; None if all labels are known before training."""
        self.last: tuple[torch.Tensor, ...] = ()
        """The loss, the reward, the log-probability and the label of each answer of the last batch."""

    def denominator(self, batch: Batch) -> float:
        """Return the number of answers."""
        return len(rows_with_loss(batch))

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the references that are not known yet, and this rank's part of the KL term of the step."""
        self.own_ratios_R = None
        rows, indices = self.rows_of_step(context, [row for batch in batches for row in labelled_rows(batch)])
        with context.full_weights():
            self.references.compute(context, batches)
            if self.has_kl(rows) and indices:
                self.own_ratios_R = self.ratios(context, mismatched_batches(rows, batches))

    def exchange(self, context: ObjectiveContext) -> None:
        """Compute the KL term of the step."""
        if self.exchanged is None:  # a batch could not be read
            return
        rows, indices = self.exchanged[1]
        kl = mean_of_ranks(context, self.own_ratios_R, indices, len(rows)).clamp(min=0) if self.has_kl(rows) else 0.0
        self.exchanged = None
        good = sum(row.is_good for row in rows)
        self.step = StepTotals(kl=kl, good=good, bad=len(rows) - good)

    def has_kl(self, rows: Sequence[LabelledRow]) -> bool:
        """Return whether there is a KL term in a step of these rows."""
        return self.references.started and has_mismatched(rows)

    def rows_of_step(self, context: ObjectiveContext, own: list[LabelledRow]) -> StepRows:
        """Return the rows of all ranks in order. A retry after out-of-memory reuses those of the first attempt."""
        if self.exchanged is None or self.exchanged[0] != own:
            of_ranks = context.process_group.all_gather_object(own, "the rows of a step")
            self.exchanged = own, StepRows.of(of_ranks, rank=context.process_group.rank)
            if self.labels is not None and context.noise_seed is not None:
                self.labels.update(row.is_good for row in self.exchanged[1].rows)
                refuse_one_label(self.labels)
        return self.exchanged[1]

    def reference_batches(self, context: ObjectiveContext, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches, and those of the mismatched answers of the KL term."""
        rows, _ = self.rows_of_step(context, [row for batch in batches for row in labelled_rows(batch)])
        return [*batches, *(mismatched_batches(rows, batches) if has_mismatched(rows) else ())]

    def ratios(self, context: ObjectiveContext, batches: Sequence[Batch]) -> torch.Tensor:
        """Return L - R of each row of the batches [R]; at least one row."""
        with torch.no_grad():
            policy = log_probs(context, batches)
        if self.references.recorded:
            reference = torch.cat([self.references.of(batch, like=policy)[:, 0] for batch in batches])
        else:
            # Once for all batches: their number differs between ranks that share the weights.
            with cast(ReferenceModel, context.lm).reference():
                reference = log_probs(context, batches)
        return policy - reference

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        """Return the sum of the losses of the answers, and the metrics of `metrics`."""
        log_probs_RA = answer_sums(context.token_log_probs(batch), batch, answers=1).log_probs_RA
        is_good = good_rows(batch)[rows_with_loss(batch)]
        with_loss = to_device(rows_with_loss(batch), log_probs_RA.device)
        log_probs_R = log_probs_RA[with_loss, 0]
        ratio_R = log_probs_R - self.references.of(batch, like=log_probs_RA)[with_loss, 0]
        is_good_R = to_device(is_good, ratio_R.device)
        weights = self.desirable_weight, self.undesirable_weight
        losses_R = kto(ratio_R, is_good_R, kl=self.step.kl, beta=self.beta, weights=weights)
        total = losses_R.sum().float()
        with torch.no_grad():
            rewards_R = self.beta * ratio_R
            self.last = losses_R.detach(), rewards_R, log_probs_R.detach(), is_good_R
            return total, self.metrics(rewards_R, log_probs_R, is_good)

    def objective_rows(self, batch: Batch) -> list[ObjectiveRow]:
        """Return the loss of each answer, its reward and its log-probability, and whether it is good (1 or 0)."""
        return [
            ObjectiveRow(loss, {"reward": reward, "logp": log_prob, "is_good": int(is_good)})
            for loss, reward, log_prob, is_good in zip(*(values_R.tolist() for values_R in self.last), strict=True)
        ]

    def metrics(
        self, rewards_R: torch.Tensor, log_probs_R: torch.Tensor, is_good: torch.Tensor
    ) -> dict[str, WeightedMean]:
        """Return means over good answers (`chosen`) and over bad ones (`rejected`), and z, under the names of TRL.

        `rewards/margins` is the difference of the mean rewards of the step's good and bad answers.

        Args:
            rewards_R: Reward of each answer.
            log_probs_R: Log-probability of each answer.
            is_good: Which answers are good, bool [R], on the host.
        """
        rows, step = len(is_good), self.step
        good_G, bad_G = (to_device(which.nonzero()[:, 0], rewards_R.device) for which in (is_good, ~is_good))
        result = {"kl": WeightedMean(step.kl * rows, rows)}
        for name, values_R in (("rewards", rewards_R), ("logps", log_probs_R)):
            result[f"{name}/chosen"] = WeightedMean(values_R[good_G].sum(), len(good_G))
            result[f"{name}/rejected"] = WeightedMean(values_R[bad_G].sum(), len(bad_G))
        if step.good and step.bad:
            margin = rewards_R[good_G].sum() / step.good - rewards_R[bad_G].sum() / step.bad
            result["rewards/margins"] = WeightedMean(margin, rows / (step.good + step.bad))
        return result


def refuse_one_label(labels: Counter[bool]) -> None:
    """Raise DataError if many answers were read, and all have the same label."""
    if len(labels) == 1 and labels.total() >= ANSWERS_OF_ONE_LABEL:
        only, other = ("good", "bad") if labels[True] else ("bad", "good")
        raise DataError(
            f"all {labels.total():,} answers read so far are {only}, and good ones are compared with bad ones; mix in "
            f"{other} ones (data.mix), or shuffle the rows of the stream"
        )


def good_rows(batch: Batch) -> torch.Tensor:
    """Return which rows have good answers, bool; all of them in batches that measure memory."""
    if batch.row_values_NK is None:
        return torch.ones(batch.rows, dtype=torch.bool)
    return batch.row_values_NK[:, 0] > 0.5


def labelled_rows(batch: Batch) -> list[LabelledRow]:
    """Return the rows of a batch."""
    result = list[LabelledRow]()
    for key, (sequence, columns), is_good in zip(
        batch.keys, row_columns(batch), good_rows(batch).tolist(), strict=True
    ):
        labels = tuple(batch.labels_BT[sequence, columns].tolist())
        prompt = next((index for index, label in enumerate(labels) if label != -100), len(labels))
        result.append(LabelledRow(key, tuple(batch.input_ids_BT[sequence, columns].tolist()), prompt, labels, is_good))
    return result


def mismatched(row: LabelledRow, other: LabelledRow, *, longest: int) -> LabelledRow:
    """Return the prompt of a row with the answer of another row, of at most `longest` tokens."""
    ids = row.ids[: row.prompt_tokens] + other.ids[other.prompt_tokens :]
    labels = row.labels[: row.prompt_tokens] + other.labels[other.prompt_tokens :]
    return LabelledRow(row.key, ids[:longest], row.prompt_tokens, labels[:longest], other.is_good)


def has_mismatched(rows: Sequence[LabelledRow]) -> bool:
    """Return whether a step has two different rows."""
    return any(row.ids != rows[0].ids for row in rows)


def partners_of(rows: Sequence[LabelledRow]) -> dict[LabelledRow, LabelledRow]:
    """Return for each row of a step the nearest different row before it; the last row comes before the first.

    Args:
        rows: All rows of the step, in order; at least two differ.
    """
    start = next(index for index, row in enumerate(rows) if row.ids != rows[index - 1].ids)
    partners, partner = dict[LabelledRow, LabelledRow](), rows[start - 1]
    for before, row in pairwise([partner, *rows[start:], *rows[:start]]):
        if before.ids != row.ids:
            partner = before
        partners[row] = partner
    return partners


def mismatched_batches(rows: Sequence[LabelledRow], batches: Iterable[Batch]) -> list[Batch]:
    """Return each row of the batches, in order, with the answer of the row before it in a step; see `partners_of`.

    Args:
        rows: All rows of the step, in order; at least two differ.
        batches: Some of them. Each becomes one or more batches of at most as many tokens with padding, or of one row.
    """
    partners, longest = partners_of(rows), max(len(row.ids) for row in rows)
    result = list[Batch]()
    for batch in batches:
        mixed = [mismatched(row, partners[row], longest=longest) for row in labelled_rows(batch)]
        result += batches_of(mixed, max_tokens=batch.input_ids_BT.numel())
    return result


def log_probs(context: ObjectiveContext, batches: Iterable[Batch]) -> torch.Tensor:
    """Return the log-probability of the answer of each row of the batches [R], with the weights as they are."""
    sums = (answer_sums(context.token_log_probs(batch), batch, answers=1) for batch in batches)
    return torch.cat([one.log_probs_RA[:, 0] for one in sums])


def mean_of_ranks(
    context: ObjectiveContext, own_R: torch.Tensor | None, indices: Sequence[int], rows: int
) -> torch.Tensor:
    """Return the mean of a value of each row of a step, a scalar on the device that is not read.

    The values are added up in one order on all ranks, so that rounding is the same for any number of them.

    Args:
        context: The model and its process group.
        own_R: The values of this rank's rows; None if it has none.
        indices: Their indices in the rows of the step.
        rows: Number of rows of the step.
    """
    device = next(context.module.parameters()).device
    values_S = torch.zeros(rows, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    if own_R is not None:
        values_S = values_S.index_copy(0, to_device(torch.tensor(indices), device), own_R)
    context.process_group.all_reduce_sum_([values_S])
    return values_S.mean()


def batches_of(rows: Sequence[LabelledRow], *, max_tokens: int) -> Iterator[Batch]:
    """Yield batches of rows in order, of at most `max_tokens` tokens with padding, or of one row."""
    width = max((len(row.ids) for row in rows), default=1)
    size = max(1, max_tokens // width)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        width = max(len(row.ids) for row in part)
        padded = [[*row.ids, *[0] * (width - len(row.ids))] for row in part]
        labels = [[*row.labels, *[-100] * (width - len(row.ids))] for row in part]
        lengths_B = torch.tensor([len(row.ids) for row in part])
        yield Batch(torch.tensor(padded), torch.tensor(labels), lengths_B, tuple(row.key for row in part))


class Kto(Finetune):
    """Trains on answers that are labelled good or bad."""

    config: KtoTrainer
    objective: KtoObjective

    def __init__(self, config: KtoTrainer) -> None:
        super().__init__(config, objective=KtoObjective(config))

    def _before_training(self, run: FinetuneRun) -> None:
        """Choose the weight of bad answers, and compute the references.

        The weights before training are kept in any case: mismatched pairs are not known before their step.
        """
        if self.config.undesirable_weight == "auto":
            self.objective.undesirable_weight = balanced_weight(run, self.config.desirable_weight)
        self.objective.labels = Counter() if run.batches.num_rows is None else None
        cast(ReferenceModel, run.lm).keep_reference()
        prepare_references(run, self.objective.references, when=self.config.references)

    def _after_training(self) -> None:
        """Compare the finished model with references in its precision."""
        self.objective.references.end_training()

    def probe(self, context: ProbeContext) -> TrainingProbe:
        """Return a probe as in fine-tuning, with the copy of the weights that the KL term of each step needs."""
        return with_copy(super().probe(context))


def balanced_weight(run: FinetuneRun, desirable_weight: float) -> float:
    """Return the weight with which all bad answers together weigh as much as all good ones; it is logged."""
    epoch = run.batches.steps_per_epoch
    if run.batches.num_rows is None or epoch is None:
        message = "auto needs data of a known size, not a stream; write a number"
        raise ConfigError([Problem("trainer.undesirable_weight", message)])
    good = rows = 0
    with open_steps(cast(IndexedBatches, run.batches).from_start()) as steps:
        for step in islice(steps, epoch):
            rows += sum(batch.rows for batch in step.micro_batches)
            good += sum(int(good_rows(batch).sum()) for batch in step.micro_batches)
    counts = run.process_group.all_gather_object((good, rows - good), "the labels")
    good, bad = sum(one for one, _ in counts), sum(other for _, other in counts)
    if not (good and bad):
        raise DataError(f"all {good + bad:,} answers are {'good' if good else 'bad'}; kto needs both")
    weight = desirable_weight * good / bad
    logger.info("%s good and %s bad answers: undesirable_weight is %.4g", f"{good:,}", f"{bad:,}", weight)
    run.run.note(undesirable_weight=weight)
    return weight
