"""Evaluation on labeled rows: the objective, and metrics of generated answers."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from partita.data.batching.collate import EvaluationBatches, evenly
from partita.data.rows import Rows
from partita.data.sources.mixed import row_indices_by_source
from partita.data.tokenized import TokenizedDataset
from partita.generation.oom_backoff import BatchBudget, run_with_oom_backoff
from partita.generation.predict import ShowProgress, generate_for_rows
from partita.generation.predictions import answer_of
from partita.outputs.scores import OutputScores, Scorer
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import Pipeline, PipelineParts
from partita.pipeline.eval_dataset import EvalDataset
from partita.pipeline.tune import max_loss_tokens_of, prompt_lengths
from partita_schema.common.text import counted
from partita_schema.errors import OutOfMemory
from partita_schema.rows import row_schema
from partita_schema.sections.data import Data
from partita_trainers.base import Batch, Metrics
from partita_trainers.batch_size.memory import attempt
from partita_trainers.objective import CROSS_ENTROPY, LossSums, Objective, ObjectiveContext, metric_values
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

MAX_EXPONENT = 700.0
"""A loss above it is reported with the perplexity of this one, near the largest float."""


class Evaluator(Protocol):
    """Runs the two parts of an evaluation on a backend."""

    @property
    def parts(self) -> PipelineParts:
        """The model, and what turns rows into prompts and answers into values."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the rows."""

    def loss(self, encoded: TokenizedDataset) -> Metrics | None:
        """Return `loss`; None if the backend does not compute it."""

    def generation_budget(self, rows: Rows) -> AbstractContextManager[BatchBudget]:
        """Return a context in which answers for these rows are generated with its budget."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    loss: Metrics | None
    """The loss; None if the backend does not compute it."""
    scores: OutputScores | None
    """Scores of generated answers; None if none were generated."""


def evaluate_dataset(
    evaluator: Evaluator,
    dataset: EvalDataset,
    *,
    generated: bool = True,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
) -> Evaluation:
    """Compute the loss, then generate answers and score them.

    Args:
        evaluator: The backend's part.
        dataset: Rows with answers.
        generated: Whether to generate and score answers.
        max_rows: Score only this many rows, evenly spaced. Default: all.
        progress: Opens a progress display.
    """
    loss = evaluator.loss(dataset.encoded)
    if not generated or evaluator.parts.config.plain_text:
        return Evaluation(loss, None)
    with evaluator.generation_budget(dataset.rows) as budget:
        scores = score(
            evaluator.parts,
            dataset.rows,
            budget=budget,
            max_rows=max_rows,
            progress=progress,
            process_group=evaluator.process_group,
        )
    return Evaluation(loss, scores)


class LocalEvaluator:
    """Evaluates with a model in this process, or in each process of a group."""

    def __init__(
        self,
        pipeline: Pipeline,
        tuner: BatchSizeTuner,
        *,
        sizes: BatchSizes | None = None,
        batch_size: int | None = None,
        mixed_data: Data | None = None,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:
        """Set up the evaluator.

        Args:
            pipeline: The parts of the run.
            tuner: Finds batch sizes.
            sizes: Sizes that are known; missing ones are found when they are needed.
            batch_size: Size set by the caller, which overrides the config.
            mixed_data: The `data` section of a mix; adds `loss/SOURCE` for each source.
            objective: What is computed.
        """
        self.parts = pipeline
        self.tuner = tuner
        self.sizes = sizes or BatchSizes()
        self.batch_size = batch_size
        self.mixed_data = mixed_data
        self.objective = objective
        self.process_group = tuner.process_group

    def loss(self, encoded: TokenizedDataset) -> Metrics:
        """Return `loss` and the metrics of the objective, and with a mix `loss/SOURCE`."""
        if self.sizes.evaluation is None:
            size = self.tuner.evaluation(
                encoded.lengths, max_loss_tokens_of([encoded]), batch_size=self.batch_size, objective=self.objective
            )
            self.sizes = replace(self.sizes, evaluation=size)
        with self.tuner.work("evaluation", self.sizes.evaluation) as budget:
            return mean_loss(
                self.parts,
                encoded,
                budget=budget,
                data=self.mixed_data,
                objective=self.objective,
                process_group=self.process_group,
            )

    @contextmanager
    def generation_budget(self, rows: Rows) -> Iterator[BatchBudget]:
        """Guard memory and yield the budget for answers to these rows."""
        if self.sizes.generation is None:
            lengths, shared = prompt_lengths(self.parts, [rows], process_group=self.process_group)
            size = self.tuner.generation(lengths, shared_tokens=shared, batch_size=self.batch_size)
            self.sizes = replace(self.sizes, generation=size)
        with self.tuner.work("generation", self.sizes.generation) as budget:
            yield budget


def mean_loss(
    pipeline: Pipeline,
    encoded: TokenizedDataset,
    *,
    budget: BatchBudget,
    data: Data | None = None,
    objective: Objective = CROSS_ENTROPY,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Metrics:
    """Compute `loss` and the metrics of an objective, in evaluation mode without gradients.

    By default `loss` is the mean cross-entropy per loss token in nats.

    A batch that runs out of memory is halved, and so are the batches after it. The ranks of `process_group` share the
    rows and return the same metrics.

    Args:
        pipeline: The parts of the run.
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
    pad = lm.tokenizer.pad_token_id
    batches_of = partial(EvaluationBatches, encoded, batch_size=budget.batch_size, pad_token_id=pad)
    own = {source: indices[process_group.rank :: process_group.world_size] for source, indices in groups.items()}
    sums, counts = dict.fromkeys(groups, LossSums()), dict.fromkeys(groups, 0.0)
    with torch.no_grad():
        prepare_objective(objective, context, batches_of(indices=np.concatenate(list(own.values()))))
        for source, indices in own.items():
            for batch in batches_of(indices=indices):
                sums[source] = LossSums.merge([sums[source], batch_loss(objective, context, batch, budget=budget)])
                counts[source] += objective.denominator(batch)
    if process_group.world_size > 1:
        sums_of_ranks = process_group.all_gather_object((sums, counts), "the loss")
        sums = {name: LossSums.merge([mine[name] for mine, _ in sums_of_ranks]) for name in groups}
        counts = {name: sum(mine[name] for _, mine in sums_of_ranks) for name in groups}
    whole, count = LossSums.merge(list(sums.values())), sum(counts.values())
    loss = {"loss": whole.loss / count} if count else {}
    loss |= {f"loss/{source}": sums[source].loss / counts[source] for source in groups if source and counts[source]}
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
    _, failure = attempt(lambda: objective.prepare(context, batches))
    if failure is not None:
        raise OutOfMemory(
            "a batch does not fit in memory while the objective prepares an evaluation: write a smaller "
            "trainer.eval_batch_size"
        ) from failure


def batch_loss(objective: Objective, context: ObjectiveContext, batch: Batch, *, budget: BatchBudget) -> LossSums:
    """Return the sums of an objective over a batch. Raise OutOfMemory if a single row does not fit.

    Args:
        objective: What is computed.
        context: The model.
        batch: The batch.
        budget: The batch budget; lowered when memory runs out.
    """

    def loss_of(indices: range) -> LossSums:
        total, metrics = objective.loss(context, some_rows(batch, indices))
        return LossSums.merge([LossSums(float(total), metrics)])

    def work(indices: range) -> tuple[LossSums | None, Exception | None]:
        return attempt(lambda: loss_of(indices))

    def longest(indices: range) -> int:
        return int(batch.lengths_B[indices.start : indices.stop].max())

    def describe(indices: range) -> str:
        return f"{counted(len(indices), 'row')} of {counted(longest(indices), 'token')}"

    total = LossSums()
    for part in run_with_oom_backoff(batch.rows, work, budget=budget, tokens=longest, describe=describe):
        if part.result is None:
            index = part.indices[0]
            raise OutOfMemory(
                f"row {batch.keys[index]} of {int(batch.lengths_B[index]):,} tokens does not fit in memory even alone: "
                "write a smaller preprocessing.global_max_sequence_length, quantization or a smaller model"
            ) from part.failure
        total = LossSums.merge([total, part.result])
    return total


def some_rows(batch: Batch, indices: range) -> Batch:
    """Select consecutive rows of a batch, without the padding that the other rows needed."""
    rows = slice(indices.start, indices.stop)
    lengths_B = batch.lengths_B[rows]
    width = int(lengths_B.max())
    return Batch(batch.input_ids_BT[rows, :width], batch.labels_BT[rows, :width], lengths_B, batch.keys[rows])


def score(
    parts: PipelineParts,
    rows: Rows,
    *,
    budget: BatchBudget,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> OutputScores:
    """Generate an answer for each row and score it against the reference.

    The ranks of `process_group` share the rows and return the same scores.

    Args:
        parts: The parts of the run.
        rows: Rows with answers.
        budget: The batch budget; lowered when memory runs out.
        max_rows: Score only this many rows, evenly spaced. Default: all.
        progress: Opens a progress display.
        process_group: The ranks that share the rows.
    """
    chosen = evenly(len(rows), max_rows)
    requested = rows if len(chosen) == len(rows) else rows.select(chosen)
    schema = row_schema(parts.config, supervised=True)
    answers = generate_for_rows(
        parts, requested, budget=budget, progress=progress, description="evaluating", process_group=process_group
    )
    scorer = Scorer(parts.config)
    if process_group.world_size > 1:
        records_of_ranks = process_group.all_gather_object([answer.record for answer in answers], "the answers")
        answers = (answer_of(record, parts.decoder) for records in records_of_ranks for record in records)
    for answer in answers:
        truth, answered = schema.load(requested.get([answer.row])[0]), answer.record.status == "ok"
        scorer.add(truth, answer.decoded, answered=answered)
    return scorer.scores()
