"""Evaluation on labeled rows: the objective, and metrics of generated answers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from partita.data.batching.collate import evenly
from partita.data.rows import Rows
from partita.data.tokenized import TokenizedDataset
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import generate_for_rows
from partita.generation.predictions import answer_of
from partita.outputs.scorer import OutputScores, Scorer
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.before_training import ModelBeforeTraining, complete_references
from partita.pipeline.build import LocalPipeline, Pipeline
from partita.pipeline.dataset_loss import DatasetLoss, dataset_loss, evaluation_batches
from partita.pipeline.eval_dataset import EvalDataset
from partita.pipeline.row_recorder import RecordedEvaluation, RowRecorder, ScoredRow, open_recorder
from partita.pipeline.tune import max_loss_tokens_of, prompt_lengths
from partita.runs.progress import ShowProgress
from partita_schema.config import Config
from partita_schema.rows import row_schema
from partita_schema.sections.data import Data
from partita_trainers.base import Metrics
from partita_trainers.objective import CROSS_ENTROPY, Objective
from partita_trainers.objectives.references import RelativeObjective
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)


class Evaluator(Protocol):
    """Runs the two parts of an evaluation on a backend."""

    @property
    def pipeline(self) -> Pipeline:
        """The model, and what turns rows into prompts and answers into values."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the rows."""

    def loss(self, encoded: TokenizedDataset) -> DatasetLoss | None:
        """Return the loss of the rows; None if the backend does not compute it."""

    def generation_budget(self, rows: Rows) -> AbstractContextManager[BatchBudget]:
        """Return a context in which answers for these rows are generated with its budget."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    loss: Metrics | None
    """The loss; None if the backend does not compute it."""
    scores: OutputScores | None
    """Scores of generated answers; None if none were generated."""

    @property
    def flat(self) -> Metrics:
        """All metrics in one dictionary: those of the loss, `output.metric`, and those of all outputs together."""
        return dict(self.loss or {}) | ({} if self.scores is None else self.scores.flat)


def evaluate_dataset(
    evaluator: Evaluator,
    dataset: EvalDataset,
    *,
    generated: bool = True,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
    record: RecordedEvaluation | None = None,
) -> EvaluationResult:
    """Compute the loss, then generate answers and score them.

    Args:
        evaluator: The backend's part.
        dataset: Rows with answers.
        generated: Whether to generate and score answers.
        max_rows: Score only this many rows, evenly spaced. Default: all.
        progress: Opens a progress display.
        record: Where the results of the rows are recorded. Default: nowhere.

    Raises:
        OSError: The results of the rows cannot be written.
    """
    pipeline, process_group, count = evaluator.pipeline, evaluator.process_group, dataset.num_expected
    answered = generated and is_answered(pipeline.config) and count > 0
    is_whole = max_rows is None or not answered or max_rows >= count
    loss = evaluator.loss(dataset.encoded)
    with open_recorder(
        record, pipeline.config, dataset, loss, is_whole=is_whole, answered=answered, process_group=process_group
    ) as recorder:
        scores = None
        if answered:
            with evaluator.generation_budget(dataset.rows) as budget:
                scores = score(
                    pipeline,
                    dataset.rows,
                    expected_N=dataset.expected_N,
                    budget=budget,
                    max_rows=max_rows,
                    progress=progress,
                    on_row=recorder.add if recorder is not None else None,
                    process_group=process_group,
                )
        evaluation = EvaluationResult(None if loss is None else loss.metrics, scores)
        if record is not None:
            write = partial(write_rows, recorder, evaluation)
            process_group.run_on_rank_zero(write, "the results of rows")
    return evaluation


def is_answered(config: Config) -> bool:
    """Return whether rows have answers that can be generated and scored."""
    return not config.plain_text and all(output.is_compared for output in config.output_features)


def write_rows(recorder: RowRecorder | None, evaluation: EvaluationResult) -> None:
    """Write the results of the rows with the metrics of the evaluation, unless earlier ones are kept."""
    if recorder is not None:
        recorder.write(evaluation.flat)


class LocalEvaluator:
    """Evaluates with a model in this process, or in each process of a group."""

    def __init__(
        self,
        pipeline: LocalPipeline,
        tuner: BatchSizeTuner,
        *,
        sizes: BatchSizes | None = None,
        batch_size: int | None = None,
        mixed_data: Data | None = None,
        objective: Objective = CROSS_ENTROPY,
        before_training: ModelBeforeTraining | None = None,
    ) -> None:
        """Set up the evaluator.

        Args:
            pipeline: The model, tokenizer and decoder of the run.
            tuner: Finds batch sizes.
            sizes: Sizes that are known; missing ones are found when they are needed.
            batch_size: Size set by the caller, which overrides the config.
            mixed_data: The `data` section of a mix; adds `loss/SOURCE` for each source.
            objective: What is computed.
            before_training: The model before training, if the run is finished.
        """
        self.pipeline = pipeline
        self.tuner = tuner
        self.sizes = sizes or BatchSizes()
        self.batch_size = batch_size
        self.mixed_data = mixed_data
        self.objective = objective
        self.before_training = before_training
        self.process_group = tuner.process_group

    def loss(self, encoded: TokenizedDataset) -> DatasetLoss | None:
        """Return the loss of the rows, with the metrics of the objective, and with a mix `loss/SOURCE`.

        None, with a warning, if the objective compares with the model before training, and that cannot be loaded.
        """
        objective = self.objective
        if self.sizes.evaluation is None:
            size = self.tuner.evaluation(
                encoded.lengths, max_loss_tokens_of([encoded]), batch_size=self.batch_size, objective=objective
            )
            self.sizes = replace(self.sizes, evaluation=size)
        with self.tuner.work("evaluation", self.sizes.evaluation) as budget:
            if not self.knows_references(encoded, batch_size=budget.batch_size):
                return None
            return dataset_loss(
                self.pipeline,
                encoded,
                budget=budget,
                data=self.mixed_data,
                objective=objective,
                process_group=self.process_group,
            )

    def knows_references(self, encoded: TokenizedDataset, *, batch_size: int) -> bool:
        """Compute what the objective needs of the model before training; return False if that cannot be loaded."""
        objective, group = self.objective, self.process_group
        if self.before_training is None or not isinstance(objective, RelativeObjective) or objective.references is None:
            return True
        own = np.arange(len(encoded))[group.rank :: group.world_size]
        batches = evaluation_batches(self.pipeline.lm, encoded, batch_size=batch_size, indices=own)
        return complete_references(objective, self.before_training, self.pipeline, batches, process_group=group)

    @contextmanager
    def generation_budget(self, rows: Rows) -> Iterator[BatchBudget]:
        """Guard memory and yield the budget for answers to these rows."""
        if self.sizes.generation is None:
            lengths, shared = prompt_lengths(self.pipeline, [rows], process_group=self.process_group)
            size = self.tuner.generation(lengths, shared_tokens=shared, batch_size=self.batch_size)
            self.sizes = replace(self.sizes, generation=size)
        with self.tuner.work("generation", self.sizes.generation) as budget:
            yield budget


def score(
    pipeline: Pipeline,
    rows: Rows,
    *,
    budget: BatchBudget,
    expected_N: np.ndarray | None = None,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
    on_row: Callable[[ScoredRow], None] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> OutputScores:
    """Generate an answer for each row and score it against the reference.

    The ranks of `process_group` share the rows and return the same scores.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        rows: Rows with answers.
        budget: The batch budget; lowered when memory runs out.
        expected_N: Indices of the rows whose answer the model should give, in order. Default: all.
        max_rows: Score only this many of them, evenly spaced. Default: all.
        progress: Opens a progress display.
        on_row: Called on this rank with each row after it is scored, in any order.
        process_group: The ranks that share the rows.
    """
    expected_N = np.arange(len(rows)) if expected_N is None else expected_N
    chosen = expected_N[evenly(len(expected_N), max_rows)]
    requested = rows if len(chosen) == len(rows) else rows.select(chosen)
    schema = row_schema(pipeline.config, supervised=True)
    answers = generate_for_rows(
        pipeline, requested, budget=budget, progress=progress, description="evaluating", process_group=process_group
    )
    scorer = Scorer(pipeline.config)
    if process_group.world_size > 1:
        records_of_ranks = process_group.all_gather_object([answer.record for answer in answers], "the answers")
        answers = (answer_of(record, pipeline.decoder) for records in records_of_ranks for record in records)
    with synchronized_errors(process_group, "the scores of the answers"):
        for answer in answers:
            raw = requested.get([answer.row])[0]
            key = requested.key(answer.row)
            truths = [
                pipeline.row_tokenizer.reference(row, key=key) for row in schema.with_each_answer(schema.read(raw))
            ]
            scores = scorer.add(
                truths[0],
                answer.decoded,
                answered=answer.record.status == "ok",
                scores=answer.record.scores,
                more_truths=truths[1:],
            )
            if on_row is not None:
                on_row(ScoredRow(int(chosen[answer.row]), raw, truths, answer, scores))
        return scorer.scores()
