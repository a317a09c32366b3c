"""The verbs on Ray: `backend: {type: ray}`."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.backends.base import Backend, Metrics
from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.backends.ray.actors import RayWorkerBackend
from partita.backends.ray.job import PoolGenerator
from partita.backends.ray.messages import LoadRequest
from partita.backends.ray.rank_monitor import EVALUATION, SIMULATION
from partita.backends.ray.ranks import check_is_alone, enter_start_folder, run_on_ranks, shared_marker
from partita.backends.ray.worker_pool import WorkerPool, log_smallest
from partita.backends.refusals import EVALUATE_ONLY, RAY
from partita.data.batching.collate import EvaluationBatches
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.retrieval import build_retriever
from partita.data.rows import Rows
from partita.data.tokenized import TokenizedDataset
from partita.generation.oom_backoff import BatchBudget
from partita.generation.prompts import PromptSource
from partita.pipeline.build import Labels, Pipeline, assemble_pipeline, training_texts
from partita.pipeline.dataset_loss import (
    BatchLoss,
    DatasetLoss,
    RowLosses,
    has_rows,
    loss_metrics,
    weights_of_rows,
)
from partita.pipeline.tune import max_loss_tokens_of, prompt_lengths
from partita.runs.manifest import read_manifest
from partita.simulation.build import section_of
from partita.simulation.report import SimulationReport
from partita.simulation.transcripts import discard
from partita.tokenizers.load import load_tokenizer
from partita_schema.common.text import counted
from partita_schema.sections.backend import RayBackendConfig
from partita_schema.sections.model import ScratchModel
from partita_trainers.base import Batch, TrainResult
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.callback_setup import callback_classes
from partita_trainers.objective import CROSS_ENTROPY, LossSums, Objective, denominator_of
from partita_trainers.objectives.of_config import compares_with_start, evaluation_objective
from partita_trainers.process_group import SINGLE_PROCESS
from partita_trainers.registry import build_trainer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


class RayBackend(Backend):
    """Trains and simulates on ranks that Ray starts; predicts and evaluates with a pool of workers."""

    refusals = RAY

    def __init__(self, context: RunContext) -> None:
        """Start nothing; workers are started when a verb first needs them."""
        super().__init__(context)
        self._pool: WorkerPool | None = None
        self._pipeline: Pipeline | None = None

    # Prediction and evaluation

    def pipeline(self) -> Pipeline:
        """Return the pipeline for prediction, with the model on workers."""
        if self._pipeline is None:
            self.context.check_single_process()
            self.context.use_finished_run()
            self._pool, self._pipeline = build_ray_pipeline(self.context)
        return self._pipeline

    @property
    def pool(self) -> WorkerPool:
        """The workers."""
        self.pipeline()
        assert self._pool is not None
        return self._pool

    def prediction_budget(self, prompts: PromptSource, *, batch_size: int | None) -> BatchBudget:
        """Return the rows that each worker generates at a time."""
        evaluator = RayEvaluator(self.pipeline(), self.pool, batch_size=batch_size)
        return evaluator.budget(prompts.lengths, shared_tokens=len(prompts.prefix))

    def evaluator(self, *, batch_size: int | None) -> "RayEvaluator":
        """Return the evaluator with the model on workers."""
        config, objective = self.context.config, CROSS_ENTROPY
        if not compares_with_start(config):  # else ranks evaluate
            objective = evaluation_objective(config, undesirable_weight=None)
        return RayEvaluator(self.with_reward(self.pipeline()), self.pool, batch_size=batch_size, objective=objective)

    def evaluate(self, dataset: Any, *, batch_size: int | None) -> Metrics:
        """Compute metrics on labeled rows, those of a loss that compares with the model before training on ranks."""
        if compares_with_start(self.context.config):
            return self.evaluate_on_ranks(dataset, batch_size=batch_size)
        return super().evaluate(dataset, batch_size=batch_size)

    # Ranks

    def evaluate_on_ranks(self, dataset: Any, *, batch_size: int | None) -> Metrics:
        """Compute metrics on Ray ranks, each of which runs `LocalBackend.evaluate`."""
        context = self.context
        context.use_finished_run()
        self._pool = self._pipeline = None  # the workers would hold their models meanwhile
        check_is_alone()
        assert context.run is not None
        folder = context.output_folder
        with shared_marker(folder) as mark:
            call = partial(
                evaluate_as_rank,
                context.for_other_process(),
                dataset=dataset,
                splits=context.splits,
                run=context.run.resolve(),
                folder=folder.resolve(),
                mark=mark,
                start=Path.cwd(),
                batch_size=batch_size,
            )
            metrics: Metrics = run_on_ranks(call, context.config, quiet=context.quiet, storage=mark, work=EVALUATION)
        return metrics

    def train(self, dataset: Any, run: str | Path | None, *, callbacks: Sequence[object] = ()) -> TrainResult:
        """Train in Ray ranks, each of which runs `LocalBackend.train` with the folder of the run."""
        context = self.context
        context.refuse_code("training")
        build_trainer(context.config.trainer, folder=context.loaded.folder)
        callback_classes(context.config.callbacks, folder=context.loaded.folder)
        chosen = context.choose_run(None if run is None else Path(run))
        folder = chosen.folder
        self._pool = self._pipeline = None  # they hold the model of another run
        manifest = read_manifest(folder)
        if manifest.get("status") == "done" and manifest.get("config") == context.config.model_dump(mode="json"):
            return LocalBackend(context).train(dataset, folder, callbacks=callbacks)
        if chosen.not_continued:
            logger.info("%s", chosen.not_continued)
        if not context.config.trains:
            self.refusals.refuse(EVALUATE_ONLY)
        check_is_alone()
        with shared_marker(folder) as mark:
            call = partial(
                train_as_rank,
                context.for_other_process(),
                dataset=dataset,
                callbacks=callbacks,
                folder=folder.resolve(),
                mark=mark,
                start=Path.cwd(),
            )
            result: TrainResult = run_on_ranks(call, context.config, quiet=context.quiet, storage=mark)
        context.run, context.splits = folder, {} if dataset is None else context.open_data(dataset).splits
        return replace(result, run=folder)

    def simulate(self, output: Path | None, *, batch_size: int | None, fresh: bool) -> SimulationReport:
        """Roll out episodes in Ray ranks, each of which runs `LocalBackend.simulate`."""
        self.check_model("simulate")
        self.refuse_best_of("simulate")
        context = self.context
        section = section_of(context.config)
        context.refuse_code("simulation")
        context.use_finished_run()
        folder = output if output is not None else context.output_folder / "transcripts"
        check_is_alone()
        if fresh:  # here and not in the ranks, which resume when they are restarted
            for history in section.history:
                discard(folder, history)
        with shared_marker(folder) as mark:
            call = partial(
                simulate_as_rank,
                context.for_other_process(),
                run=context.run.resolve() if context.run is not None else None,
                folder=folder.resolve(),
                mark=mark,
                start=Path.cwd(),
                batch_size=batch_size,
            )
            report: SimulationReport = run_on_ranks(
                call, context.config, quiet=context.quiet, storage=mark, work=SIMULATION
            )
        return replace(report, folder=str(folder))

    # Verbs that are not supported


class RayEvaluator:
    """Evaluates with a pool of workers."""

    process_group = SINGLE_PROCESS

    def __init__(
        self,
        pipeline: Pipeline,
        pool: WorkerPool,
        *,
        batch_size: int | None,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:
        """Set up the evaluator.

        Args:
            pipeline: The model, tokenizer and decoder of the run.
            pool: The workers.
            batch_size: Batch size set by the caller, or None.
            objective: What is computed.
        """
        self.pipeline = pipeline
        self.pool = pool
        self.batch_size = batch_size
        self.objective = objective

    def loss(self, encoded: TokenizedDataset) -> DatasetLoss:
        """Compute the same loss as `partita.pipeline.dataset_loss`: same batches, same order of summation."""
        pool, objective = self.pool, self.objective
        offers: list[BatchSize] = pool.ask(
            "evaluation_size",
            encoded.lengths,
            max_loss_tokens_of([encoded]),
            batch_size=self.batch_size,
            objective=objective,
        )
        log_smallest("evaluation", offers)
        size = min(offers, key=lambda offer: offer.rows)
        batches = EvaluationBatches(
            encoded,
            batch_size=size.rows,
            pad_token_id=pool.tokenizer.pad_token_id,
            two_sided=pool.answer_context is not None,
        )
        sent: list[tuple[np.ndarray, np.ndarray]] = []
        """Indices and weights of the rows of each batch."""
        counts: list[float] = []
        """Denominator of each batch."""

        def tasks() -> Iterator[tuple[Batch, Objective]]:
            for indices_n, batch in batches.numbered():
                sent.append((indices_n, weights_of_rows(batch, objective)))
                counts.append(denominator_of(objective, batch))
                yield batch, objective

        losses: list[BatchLoss] = pool.each("loss", tasks(), size=size)
        sums = {"": LossSums.merge([loss.sums for loss in losses])}
        metrics = loss_metrics(sums, {"": sum(counts)}, encoded=encoded, objective=objective)
        if not has_rows(objective):
            return DatasetLoss(metrics)
        rows = RowLosses(len(encoded))
        for (indices_n, weights_n), loss in zip(sent, losses, strict=True):
            rows.set(indices_n, loss, weights_n)
        return DatasetLoss(metrics, rows)

    @contextmanager
    def generation_budget(self, rows: Rows) -> Iterator[BatchBudget]:
        """Yield the rows that each worker generates at a time."""
        lengths, shared = prompt_lengths(self.pipeline, [rows])
        yield self.budget(lengths, shared_tokens=shared)

    def budget(self, lengths: "npt.NDArray[np.integer]", *, shared_tokens: int) -> BatchBudget:
        """Return the rows that each worker generates at a time: as set, else what the smallest worker fits.

        Args:
            lengths: Prompt lengths in tokens, [rows].
            shared_tokens: Length of the prefix that all prompts share, in tokens.
        """
        offer = self.pool.offer(
            self.pipeline.generation,
            lengths=lengths,
            shared_tokens=shared_tokens,
            batch_size=self.batch_size,
            max_new_tokens=self.pipeline.max_new_tokens,
        )
        return BatchBudget(offer.size.rows, token_budget=offer.token_budget)


def build_ray_pipeline(context: RunContext) -> tuple[WorkerPool, Pipeline]:
    """Return a pool of workers, and the pipeline of the run with it; rows are tokenized in this process.

    Raises:
        ConfigError: Ray is not installed.
    """
    config, folder, saved = context.config, context.loaded.folder, context.weights
    assert isinstance(config.backend, RayBackendConfig)
    labels, training = context.known_labels()
    worker_backend = RayWorkerBackend(config.backend, device=config.model_parameters.device)
    tokenizer = load_tokenizer(config, folder=folder, texts=partial(training_texts, config, training), saved=saved)
    retriever = build_retriever(config, training=training, folder=folder)
    pool = WorkerPool(
        worker_backend,
        load_request(context, tokenizer, labels=labels),
        tokenizer=tokenizer,
        workers=worker_backend.workers,
        timeout_seconds=config.backend.timeout_seconds,
    )
    row_tokenizer = build_row_tokenizer(
        config,
        tokenizer=tokenizer,
        context_length=pool.context_length,
        answers=pool.answer_context,
        labels=labels,
        retriever=retriever,
        folder=folder,
    )
    if config.head_output is not None:  # in the order of the checkpoint's head
        labels = {**labels, config.head_output.name: pool.facts.head_labels or ()}
    # The rows of a reward model may hold two answers to a prompt, each of which fits.
    generator = PoolGenerator(pool, is_limited=not config.scores_answers)
    pipeline = assemble_pipeline(config, pool, generator, row_tokenizer, folder=folder, labels=labels)
    logger.info("%s with the model on Ray", counted(worker_backend.workers, "worker"))
    return pool, pipeline


def load_request(context: RunContext, tokenizer: "PreTrainedTokenizerFast", *, labels: Labels) -> LoadRequest:
    """Return what each worker loads."""
    saved = context.weights
    new = isinstance(context.config.base_model, ScratchModel) and saved is None
    return LoadRequest(
        config=context.config,
        folder=context.loaded.folder.resolve(),
        tokenizer=tokenizer if new else None,
        saved=None if saved is None else saved.resolve(),
        labels=labels,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
    )


def train_as_rank(
    context: RunContext, *, dataset: Any, callbacks: Sequence[object] = (), folder: Path, mark: Path, start: Path
) -> TrainResult:
    """Train on one Ray rank, from the folder of the command.

    Args:
        context: What the command works on.
        dataset: Replaces data.source, or None.
        callbacks: Copies of the callbacks that were passed.
        folder: The run directory.
        mark: The marker folder of `shared_marker`.
        start: The folder where the command was started.

    Raises:
        PartitaError: The run directory is not shared.
    """
    enter_start_folder(start, folder=folder, mark=mark, option="--run")
    return LocalBackend(context).train(dataset, folder, callbacks=callbacks)


def evaluate_as_rank(
    context: RunContext,
    *,
    dataset: Any,
    splits: Mapping[str, Rows],
    run: Path,
    folder: Path,
    mark: Path,
    start: Path,
    batch_size: int | None,
) -> Metrics:
    """Evaluate on one Ray rank with the model of a run, from the folder of the command.

    Args:
        context: What the command works on.
        dataset: The rows, or None for those of the run.
        splits: The rows of the run, if it was trained by this command.
        run: Directory of the trained run.
        folder: Folder of the marker: the run, or the current runs if the run cannot be written.
        mark: The marker folder of `shared_marker`.
        start: The folder where the command was started.
        batch_size: Batch size set by the caller, or None.

    Raises:
        PartitaError: The run directory is not shared.
    """
    enter_start_folder(start, folder=folder, mark=mark, option="partita evaluate RUN")
    context.run, context.splits = run, dict(splits)
    return LocalBackend(context).evaluate(dataset, batch_size=batch_size)


def simulate_as_rank(
    context: RunContext, *, run: Path | None, folder: Path, mark: Path, start: Path, batch_size: int | None
) -> SimulationReport:
    """Simulate on one Ray rank with the model of a run.

    Args:
        context: What the command works on.
        run: Directory of the trained run, or None.
        folder: Folder for the transcripts.
        mark: The marker folder of `shared_marker`.
        start: The folder where the command was started.
        batch_size: Batch size set by the caller, or None.

    Raises:
        PartitaError: The folder of transcripts is not shared.
    """
    enter_start_folder(start, folder=folder, mark=mark, option="--output")
    context.run = run
    return LocalBackend(context).simulate(folder, batch_size=batch_size, fresh=False)
