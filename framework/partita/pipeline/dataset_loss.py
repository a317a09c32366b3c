"""The loss of a dataset, and of each of its rows, in evaluation mode without gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from partita.data.batching.collate import EvaluationBatches
from partita.data.sources.mixed import row_indices_by_source
from partita.data.tokenized import TokenizedDataset
from partita.generation.oom_backoff import BatchBudget, run_with_oom_backoff
from partita.lm.base import GenerativeModel
from partita.pipeline.build import LocalPipeline
from partita_schema.common.text import counted
from partita_schema.errors import OutOfMemory
from partita_schema.sections.data import Data
from partita_trainers.base import Batch, Metrics
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.objective import (
    CROSS_ENTROPY,
    LossSums,
    Objective,
    ObjectiveContext,
    RowObjective,
    denominator_of,
    exchange,
    loss_of,
    metric_values,
)
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup
from partita_trainers.steps.micro_batches import select_sequences

MAX_EXPONENT = 700.0
"""A loss above it is reported with the perplexity of this one, near the largest float."""


class RowLosses:
    """Sums of the loss tokens' losses of each row, in float64. N rows."""

    def __init__(self, rows: int) -> None:
        self.sums_N = np.zeros(rows)
        """Sum of each row."""
        self.tokens_N = np.zeros(rows, dtype=np.int64)
        """Number of loss tokens of each row; 1 for an objective that averages over rows."""
        self.values: dict[int, Mapping[str, float]] = {}
        """Numbers of the objective, by name, of each row by its index; none of cross-entropy."""

    def set(self, indices_n: np.ndarray, loss: "BatchLoss", tokens_n: np.ndarray) -> None:
        """Set the losses of the rows of a batch, each of which is set once.

        Args:
            indices_n: Indices of the rows.
            loss: The loss of the batch; without sums of rows if none of them has a loss token.
            tokens_n: Number of loss tokens of each row, or ones; see `weights_of_rows`.
        """
        self.tokens_N[indices_n] = tokens_n
        if loss.rows_n is not None:
            self.sums_N[indices_n] = loss.rows_n
        self.values |= zip(indices_n.tolist(), loss.values_n, strict=False)

    @classmethod
    def merge(cls, parts: Sequence["RowLosses"]) -> "RowLosses | None":
        """Return the losses of the rows of all ranks, each of which has set some; None if there are none."""
        if not parts:
            return None
        whole = cls(len(parts[0].sums_N))
        for part in parts:
            whole.sums_N += part.sums_N
            whole.tokens_N += part.tokens_N
            whole.values |= part.values
        return whole

    def means_of_answers(self, answer_of_N: np.ndarray, *, answers: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean loss of each answer, NaN without loss tokens, and its number of loss tokens, both [answers].

        `answer_of_N` is the index of the answer that each row belongs to, -1 for none.
        """
        used_N = answer_of_N >= 0
        sums = np.bincount(answer_of_N[used_N], weights=self.sums_N[used_N], minlength=answers)
        tokens = np.bincount(answer_of_N[used_N], weights=self.tokens_N[used_N], minlength=answers).astype(np.int64)
        return np.divide(sums, tokens, out=np.full(answers, np.nan), where=tokens > 0), tokens


@dataclass(frozen=True)
class DatasetLoss:
    """The loss of a dataset."""

    metrics: Metrics
    """`loss`, and the metrics of the objective."""
    rows: RowLosses | None = None
    """The losses of the rows; None if the objective has none for single rows."""


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a batch of n rows."""

    sums: LossSums
    """Sums of the objective over the batch."""
    rows_n: np.ndarray | None
    """Sum of each row, float64; None if the objective has none for single rows."""
    values_n: Sequence[Mapping[str, float]] = ()
    """Numbers of the objective for each row; none of cross-entropy."""


def dataset_loss(
    pipeline: LocalPipeline,
    encoded: TokenizedDataset,
    *,
    budget: BatchBudget,
    data: Data | None = None,
    objective: Objective = CROSS_ENTROPY,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> DatasetLoss:
    """Compute `loss` and the metrics of an objective, in evaluation mode without gradients.

    By default `loss` is the mean cross-entropy per loss token in nats.

    A batch that runs out of memory is halved, and so are the batches after it. The ranks of `process_group` share the
    rows and return the same losses.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        encoded: Tokenized rows with loss tokens.
        budget: The batch budget; lowered when memory runs out.
        data: The `data` section of a mix; adds `loss/SOURCE` for each source.
        objective: What is computed.
        process_group: The ranks that share the rows.

    Raises:
        OutOfMemory: A single row does not fit.
    """
    lm = pipeline.lm
    lm.check_loss()
    indices_by_source = row_indices_by_source(data, encoded.keys) if data is not None else {}
    groups = indices_by_source or {"": np.arange(len(encoded))}
    lm.module.eval()
    context = ObjectiveContext(lm, lm.module, process_group)
    batches_of = partial(evaluation_batches, lm, encoded, batch_size=budget.batch_size)
    own = {source: indices[process_group.rank :: process_group.world_size] for source, indices in groups.items()}
    sums, counts = dict.fromkeys(groups, LossSums()), dict.fromkeys(groups, 0.0)
    rows = RowLosses(len(encoded)) if has_rows(objective) else None
    with torch.no_grad():
        prepare_objective(objective, context, batches_of(indices=np.concatenate(list(own.values()))))
        for source, indices in own.items():
            for indices_n, batch in batches_of(indices=indices).numbered():
                loss = batch_loss(objective, context, batch, budget=budget)
                sums[source] = LossSums.merge([sums[source], loss.sums])
                counts[source] += denominator_of(objective, batch)
                if rows is not None:
                    rows.set(indices_n, loss, weights_of_rows(batch, objective))
    if process_group.world_size > 1:
        sums_of_ranks = process_group.all_gather_object((sums, counts, rows), "the loss")
        sums = {name: LossSums.merge([mine[name] for mine, _, _ in sums_of_ranks]) for name in groups}
        counts = {name: sum(mine[name] for _, mine, _ in sums_of_ranks) for name in groups}
        rows = RowLosses.merge([mine for _, _, mine in sums_of_ranks if mine is not None])
    return DatasetLoss(loss_metrics(sums, counts, encoded=encoded, objective=objective), rows)


def evaluation_batches(
    lm: GenerativeModel, encoded: TokenizedDataset, *, batch_size: int, indices: np.ndarray
) -> EvaluationBatches:
    """Return the batches in which an evaluation computes the loss.

    Args:
        lm: The model.
        encoded: Tokenized rows.
        batch_size: Rows per batch.
        indices: Indices of the rows that are evaluated.
    """
    return EvaluationBatches(
        encoded,
        batch_size=batch_size,
        pad_token_id=lm.tokenizer.pad_token_id,
        two_sided=lm.answer_context is not None,
        indices=indices,
    )


def loss_metrics(
    sums: Mapping[str, LossSums], counts: Mapping[str, float], *, encoded: TokenizedDataset, objective: Objective
) -> Metrics:
    """Return `loss` and the other metrics of the objective, and with a mix `loss/SOURCE`.

    Args:
        sums: Sums of the objective by source; one named "" without a mix.
        counts: Denominators by source.
        encoded: The tokenized rows.
        objective: What was computed.
    """
    whole, count = LossSums.merge(list(sums.values())), sum(counts.values())
    loss = {"loss": whole.loss / count} if count else {}
    loss |= {f"loss/{source}": sums[source].loss / counts[source] for source in sums if source and counts[source]}
    if objective is CROSS_ENTROPY and encoded.text_bytes is not None:
        loss |= text_metrics(whole.loss, count, text_bytes=encoded.text_bytes)
    return loss | metric_values(whole.metrics, reserved=loss)


def text_metrics(nats: float, tokens: float, *, text_bytes: int) -> Metrics:
    """Return the metrics of language modelling.

    `perplexity` is per token, and depends on the tokenizer. `bits_per_byte` does not: all bits to predict the texts and
    their end tokens, divided by the bytes of the texts (Gao et al. 2020, The Pile, section 3.1).

    Args:
        nats: Sum of the cross-entropy over all tokens.
        tokens: Number of tokens.
        text_bytes: Bytes of the texts in UTF-8.
    """
    perplexity = math.exp(min(nats / tokens, MAX_EXPONENT)) if tokens else math.nan
    return {"perplexity": perplexity, "bits_per_byte": nats / math.log(2) / max(1, text_bytes)}


def prepare_objective(objective: Objective, context: ObjectiveContext, batches: EvaluationBatches) -> None:
    """Run what the objective computes before the first loss. Raise OutOfMemory if a batch does not fit."""
    try:
        _, failure = attempt(lambda: objective.prepare(context, batches))
    except Exception:
        exchange(objective, context)  # the other ranks wait for this one
        raise
    exchange(objective, context)
    if failure is not None:
        raise OutOfMemory(
            "a batch does not fit in memory while the objective prepares an evaluation: write a smaller "
            "trainer.eval_batch_size"
        ) from failure


def batch_loss(objective: Objective, context: ObjectiveContext, batch: Batch, *, budget: BatchBudget) -> BatchLoss:
    """Return the sums of an objective over a batch, and of each row if it has any.

    Args:
        objective: What is computed.
        context: The model.
        batch: The batch.
        budget: The batch budget; lowered when memory runs out.

    Raises:
        OutOfMemory: A single row does not fit.
    """

    def work(indices: range) -> tuple[BatchLoss | None, Exception | None]:
        return attempt(lambda: one_pass(objective, context, select_sequences(batch, indices.start, indices.stop)))

    def longest(indices: range) -> int:
        return int(batch.lengths_B[indices.start : indices.stop].max())

    def describe(indices: range) -> str:
        return f"{counted(len(indices), 'row')} of {counted(longest(indices), 'token')}"

    parts = []
    for part in run_with_oom_backoff(batch.rows, work, budget=budget, tokens=longest, describe=describe):
        if part.result is None:
            index = part.indices[0]
            raise OutOfMemory(
                f"row {batch.keys[index]} of {int(batch.lengths_B[index]):,} tokens does not fit in memory even alone: "
                "write a smaller preprocessing.global_max_sequence_length, quantization or a smaller model"
            ) from part.failure
        parts.append(part.result)
    rows = [part.rows_n for part in parts if part.rows_n is not None]
    values = [value for part in parts for value in part.values_n]
    return BatchLoss(LossSums.merge([part.sums for part in parts]), np.concatenate(rows) if rows else None, values)


def has_rows(objective: Objective) -> bool:
    """Return whether an objective has results of single rows."""
    return objective is CROSS_ENTROPY or isinstance(objective, RowObjective)


def weights_of_rows(batch: Batch, objective: Objective) -> np.ndarray:
    """Return the number of loss tokens of each row of a batch, int64 [n]; 1 if the objective averages over rows."""
    if objective is not CROSS_ENTROPY:
        return np.ones(batch.rows, dtype=np.int64)
    tokens_n: np.ndarray = batch.loss_token_rows.bincount(minlength=batch.rows).numpy()
    return tokens_n


def one_pass(objective: Objective, context: ObjectiveContext, batch: Batch) -> BatchLoss:
    """Run the model once, and return the sums of an objective over a batch, and of each row if it has any."""
    if objective is not CROSS_ENTROPY:
        total, metrics = loss_of(objective, context, batch)
        sums = LossSums.merge([LossSums(float(total), metrics)])
        if not isinstance(objective, RowObjective):
            return BatchLoss(sums, None)
        results = objective.objective_rows(batch)
        losses_n = np.array([result.loss for result in results], dtype=np.float64)
        return BatchLoss(sums, losses_n, [result.values for result in results])
    losses_N = -context.token_log_probs(batch).double().cpu()
    rows_n = torch.zeros(batch.rows, dtype=torch.float64).index_add_(0, batch.loss_token_rows, losses_N)
    return BatchLoss(LossSums(float(losses_N.sum())), rows_n.numpy())
