"""The model in this process, or in each of the processes that torchrun or Ray started."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from partita.backends.agent_contexts import agent_contexts
from partita.backends.base import Backend
from partita.backends.context import RunContext
from partita.backends.reward_models import load_reward_checker
from partita.data.episode import AGENT
from partita.data.labels import find_labels
from partita.data.rows import Rows
from partita.data.run_data import RunData
from partita.export.options import ExportOptions
from partita.export.report import ExportReport
from partita.export.run import export_model
from partita.generation.generator import generate_requests, plain_requests, stream_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.prompts import PromptSource
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationRequest
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.before_training import ModelBeforeTraining, notes_of
from partita.pipeline.build import Labels, LocalPipeline, build_pipeline
from partita.pipeline.evaluate import LocalEvaluator
from partita.pipeline.fingerprint import model_fingerprint
from partita.pipeline.saved_model import write_metadata
from partita.pipeline.tune import answering_sizes
from partita.report.transcript_page import write_page
from partita.runs.cost import merged
from partita.runs.directory import RunDirectory
from partita.runs.earlier_results import remove_earlier_results
from partita.runs.exits import exits_as_errors
from partita.runs.manifest import MANIFESTS
from partita.serving.engine import MAX_REQUESTS, ServingEngine, served_tokens
from partita.simulation.build import section_of
from partita.simulation.participants import AgentModel
from partita.simulation.report import SimulationReport
from partita.simulation.run import simulate
from partita.training.run import (
    check_same_rows,
    check_sums_gradients,
    find_sizes,
    finished_result,
    train_in,
)
from partita.training.self_training import SelfTraining, check_rounds, rounds_of
from partita_schema.errors import ConfigError, DataError
from partita_schema.sections.self_training import SelfTrainingConfig
from partita_trainers.base import Trainer, TrainResult
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.callback_setup import build_callbacks, check_calls_callbacks
from partita_trainers.objectives.of_config import default_objective, evaluation_objective
from partita_trainers.process_group import main_process_first, synchronized_errors
from partita_trainers.registry import build_trainer

logger = logging.getLogger(__name__)


class LocalBackend(Backend):
    """Runs all verbs in this process. In a process group, each rank calls the same verb."""

    def __init__(self, context: RunContext) -> None:
        """Load nothing; the model is loaded when a verb first needs it."""
        super().__init__(context)
        self._pipeline: LocalPipeline | None = None
        self._tuner: BatchSizeTuner | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the model: a copy, also in another process, loads it when a verb first needs it."""
        return vars(self) | {"_pipeline": None, "_tuner": None}

    def pipeline(self) -> LocalPipeline:
        """Return the pipeline for prediction: of the last training, of the run, or for zero-shot of the base model."""
        if self._pipeline is None:
            with synchronized_errors(self.context.process_group, "loading the model"):
                self.context.use_finished_run()
                labels, training = self.context.known_labels()
                self._pipeline = self.build_pipeline(labels, training, trainable=False)
        return self._pipeline

    @property
    def tuner(self) -> BatchSizeTuner:
        """The batch-size tuner of the model in memory."""
        if self._tuner is None:
            self._tuner = self.new_tuner(self.pipeline())
        return self._tuner

    def new_tuner(self, pipeline: LocalPipeline, *, fresh: bool = False) -> BatchSizeTuner:
        """Return a tuner for a model; with `fresh`, it ignores cached sizes."""
        return BatchSizeTuner(pipeline, fresh=fresh, process_group=self.context.process_group)

    def drop_model(self) -> None:
        """Release the model; the next use loads it again."""
        self._pipeline = self._tuner = None

    def build_pipeline(
        self, labels: Labels, training: Rows | None, *, trainable: bool, tokenizer_folder: Path | None = None
    ) -> LocalPipeline:
        """Build the pipeline with a model in this process.

        Args:
            labels: Labels by output.
            training: Rows to train a new tokenizer on; None without training.
            trainable: Whether the model is trained; otherwise it has the weights of the run.
            tokenizer_folder: Where the tokenizer of a new model is kept.
        """
        return build_pipeline(
            self.context.config,
            folder=self.context.loaded.folder,
            labels=labels,
            training=training,
            saved=None if trainable else self.context.weights,
            tokenizer_folder=tokenizer_folder,
            trainable=trainable,
        )

    def prediction_budget(self, prompts: PromptSource, *, batch_size: int | None) -> BatchBudget:
        """Return the batch budget for the prompts: `batch_size` if set, else measured."""
        size = self.tuner.generation(prompts.lengths, shared_tokens=len(prompts.prefix), batch_size=batch_size)
        return self.tuner.budget("generation", size)

    def evaluator(self, *, batch_size: int | None) -> LocalEvaluator:
        """Return the evaluator with the model in memory."""
        context = self.context
        before = ModelBeforeTraining.of_run(context.run, training_rows=lambda: context.open_data().training)
        weight = before.manifest.get("undesirable_weight")
        return LocalEvaluator(
            self.with_reward(self.pipeline()),
            self.tuner,
            batch_size=batch_size,
            objective=evaluation_objective(context.config, undesirable_weight=weight),
            before_training=before,
        )

    def record_memory(self) -> None:
        """Record in the run's manifest the batch sizes that ran out of memory, and those that fitted."""
        if self._tuner is None:
            return
        used = BatchSizes(**self._tuner.used)
        self._tuner.used.clear()
        after = self._tuner.after(used)
        context = self.context
        if (
            after != used
            and context.process_group.rank == 0
            and context.run is not None
            and os.access(context.run / MANIFESTS[0], os.W_OK)
        ):
            directory = RunDirectory(context.run, config=context.config)
            directory.note(batch_sizes={**directory.manifest.get("batch_sizes", {}), **after.records()})

    # Training

    def train(self, dataset: Any, run: str | Path | None, *, callbacks: Sequence[object] = ()) -> TrainResult:
        """Train, or evaluate with `trainer: {type: none}`; see `Model.train`."""
        context, process_group = self.context, self.context.process_group
        with exits_as_errors():
            trainer = self.checked_trainer(dataset)
            callbacks = self.all_callbacks(trainer, callbacks)
        named = None if run is None else Path(run)
        chosen = process_group.run_on_rank_zero(lambda: context.choose_run(named), "the folder of the run")
        with context.open_run(chosen.folder) as directory:
            if chosen.not_continued:
                logger.info("%s", chosen.not_continued)
            if directory.finished:
                return self.use_finished(directory, dataset)
            with synchronized_errors(process_group, "opening the data"):
                data = context.open_data(dataset)
                labels = find_labels(context.config, data.training)
            result = self.train_on(data, labels, directory, trainer=trainer, callbacks=callbacks)
            model = "model" if (chosen.folder / "model").is_dir() else None
            costs = process_group.all_gather_object(directory.cost_so_far, "what the run has taken")
            if process_group.rank == 0 and "rounds" not in directory.manifest:
                directory.note(steps=result.steps)
                remove_earlier_results(directory)
            directory.note(
                cost=merged(costs), status="done", steps=result.steps, stopped_early=result.stopped_early, model=model
            )
        # No rank may read the run before its status is written.
        process_group.all_gather_object(None, "the end of the run")
        context.run, context.splits = chosen.folder, data.splits
        return replace(result, batch_sizes=directory.manifest.get("batch_sizes", {}))

    def checked_trainer(self, dataset: Any) -> Trainer:
        """Return the trainer. What the configuration asks for and training cannot do is refused before a run is made.

        Raises:
            ConfigError: The trainer cannot be created, or does not fit the other sections or the dataset.
        """
        context, config = self.context, self.context.config
        context.refuse_code("training")
        if config.generation.best_of is not None and context.process_group.rank == 0:
            logger.info(
                "generation.best_of is for predict and evaluate: answers that training generates are not chosen"
            )
        check_rounds(config, dataset, folder=context.loaded.folder)
        trainer = build_trainer(config.trainer, folder=context.loaded.folder, objective=default_objective(config))
        if rounds_of(config) is not None:
            agent_contexts(context)  # a missing model is reported before training starts
        check_sums_gradients(trainer, config, context.process_group)
        return trainer

    def train_on(
        self,
        data: RunData,
        labels: Labels,
        directory: RunDirectory,
        *,
        trainer: Trainer,
        callbacks: Sequence[object],
    ) -> TrainResult:
        """Train on the rows of a run, and then on the model's own episodes if the configuration has self-training.

        Args:
            data: The rows of the run.
            labels: Labels by output.
            directory: The open run.
            trainer: The trainer.
            callbacks: Objects that the trainer calls, on rank 0.
        """
        config, rounds = self.context.config, rounds_of(self.context.config)
        if "rounds" not in directory.manifest and (rounds is None or data.training is not None):
            self._pipeline, self._tuner, result = train_in(
                directory,
                data,
                trainer=trainer,
                process_group=self.context.process_group,
                assemble=lambda folder: self.build_pipeline(
                    labels, data.training, trainable=config.trains, tokenizer_folder=folder
                ),
                callbacks=callbacks,
            )
            directory.note(steps=result.steps, stopped_early=result.stopped_early)
        if rounds is not None:
            # Each round loads its model again, and memory may not fit two.
            self.drop_model()
            result = self.train_rounds(rounds, directory, data, callbacks=callbacks)
        return result

    def all_callbacks(self, trainer: Trainer, passed: Sequence[object]) -> Sequence[object]:
        """Return the callbacks of the configuration, created on rank 0 only, and those that the caller passed.

        Raises:
            ConfigError: A callback cannot be created, or the trainer calls none.
        """
        sections, folder = self.context.config.callbacks, self.context.loaded.folder
        process_group = self.context.process_group
        with synchronized_errors(process_group, "the callbacks"):
            if sections or passed:
                check_calls_callbacks(trainer)
            own = build_callbacks(sections, folder=folder) if process_group.rank == 0 else []
        return [*own, *passed]

    def use_finished(self, directory: RunDirectory, dataset: Any) -> TrainResult:
        """Use a run that is finished, and return its result.

        Args:
            directory: The open run.
            dataset: Replaces data.source.

        Raises:
            ResumeError: The rows are not those of the run.
        """

        def check() -> None:
            try:
                found = self.context.open_data(dataset).record()
            except (DataError, ConfigError) as error:
                if dataset is not None:
                    raise
                logger.warning("the rows are not compared with those of the finished run: %s", error)
            else:
                check_same_rows(directory, found)

        self.context.process_group.run_on_rank_zero(check, "the rows of the finished run")
        self.context.run = directory.folder
        self.drop_model()
        return finished_result(directory)

    def train_rounds(
        self, plan: SelfTrainingConfig, directory: RunDirectory, data: RunData, *, callbacks: Sequence[object]
    ) -> TrainResult:
        """Run the self-training rounds after training on data.

        Args:
            plan: The self-training section of the configuration.
            directory: The open run.
            data: The rows of the run.
            callbacks: Called in the training of each round.
        """
        if "rounds" not in directory.manifest:
            before = {"steps": directory.manifest.get("steps", 0), "metrics": directory.manifest.get("metrics", {})}
            directory.note(rounds=[], before_rounds=before)
        context = self.context
        return SelfTraining(
            config=context.config,
            plan=plan,
            origin=context.loaded.folder,
            directory=directory,
            process_group=context.process_group,
            seed=context.config.sampling_seed,
            data=data,
            open_run=context.open_run,
            others=self.agent_models,
            reward_checker=partial(load_reward_checker, context),
            callbacks=callbacks,
        ).train()

    # Other verbs

    def generate(
        self, prompts: str | Sequence[str], *, max_new_tokens: int | None, batch_size: int | None, stream: bool
    ) -> list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """Generate text after each prompt; see `Model.generate`."""
        self.check_model("generate")
        self.refuse_best_of("generate")
        pipeline = self.pipeline()
        limit = max_new_tokens or pipeline.max_new_tokens
        requests = plain_requests(pipeline.lm, prompts, max_new_tokens=limit)
        lengths = np.array([len(request.input_ids) for request in requests])
        size = self.tuner.generation(lengths, batch_size=batch_size, max_new_tokens=limit)
        if stream:
            pieces = self.stream(pipeline, requests, size)
            return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces
        with self.tuner.work("generation", size) as budget:
            settings = GenerationSettings(pipeline.generation.unconstrained, budget, self.context.config.sampling_seed)
            completions = generate_requests(pipeline.lm, requests, settings)
        self.record_memory()
        return [generated.text for generated in completions]

    def stream(
        self, pipeline: LocalPipeline, requests: Sequence[GenerationRequest], size: BatchSize
    ) -> Iterator[tuple[int, str]]:
        """Yield pairs of a request's index and the next piece of its answer."""
        with self.tuner.work("generation", size) as budget:
            settings = GenerationSettings(pipeline.generation.unconstrained, budget, self.context.config.sampling_seed)
            yield from stream_requests(pipeline.lm, requests, settings)
        self.record_memory()

    def simulate(self, output: Path | None, *, batch_size: int | None, fresh: bool) -> SimulationReport:
        """Roll out the episodes of the `simulation` section, and write their page; see `Model.simulate`."""
        self.check_model("simulate")
        self.refuse_best_of("simulate")
        section_of(self.context.config)
        self.context.refuse_code("simulation")
        models = {AGENT: self.agent_model()}
        context, process_group = self.context, self.context.process_group
        with synchronized_errors(process_group, "loading the reward model"):
            checker = load_reward_checker(context)
        folder = output if output is not None else context.output_folder / "transcripts"
        result = simulate(
            models | self.agent_models(),
            folder=folder,
            seed=context.config.sampling_seed,
            batch_size=batch_size,
            fresh=fresh,
            progress=context.progress,
            checker=checker,
            process_group=process_group,
        )
        process_group.run_on_rank_zero(partial(write_page, result), "the page of the dialogues")
        self.record_memory()
        return result.report

    def agent_models(self) -> dict[str, AgentModel]:
        """Load the models of other agents, by agent. Agents that use the file's own model are left out."""
        contexts = {name: other for name, other in agent_contexts(self.context).items() if other is not self.context}
        backends = {id(other): LocalBackend(other) for other in contexts.values()}
        return {name: backends[id(other)].agent_model() for name, other in contexts.items()}

    def agent_model(self) -> AgentModel:
        """Return the model for an agent, loaded."""
        pipeline = self.pipeline()
        return AgentModel(
            pipeline, self.tuner, model_fingerprint(pipeline, result=self.context.weights, folder=pipeline.folder)
        )

    def open_engine(self, *, max_tokens: int | None, batch_size: int | None, max_waiting: int) -> ServingEngine:
        """Return the engine of a server or a chat, not started; see `open_engine` of `model.py`."""
        self.context.check_single_process()
        pipeline = self.pipeline()
        tokens = served_tokens(pipeline.lm.context_length, max_tokens)
        new_tokens = min(pipeline.max_new_tokens, tokens // 2)
        lengths = np.full(MAX_REQUESTS, max(1, tokens - new_tokens))
        # A server keeps its rows in slots.
        options = replace(pipeline.generation, kv_cache="slots")
        size = self.tuner.generation(lengths, batch_size=batch_size, max_new_tokens=new_tokens, options=options)
        return ServingEngine(
            pipeline,
            budget=self.tuner.budget("generation", size),
            context_tokens=tokens,
            max_waiting=max_waiting,
            row_pipeline=self.with_reward(pipeline),
            weights=self.context.weights,
        )

    def tune(self, dataset: Any, *, fresh: bool) -> BatchSizes:
        """Find the best batch sizes for this machine; see `Model.tune`."""
        self.check_model("tune")
        context = self.context
        if context.config.trains and context.run is None:
            return self.tune_training(dataset, fresh=fresh)
        pipeline = self.with_reward(self.pipeline())
        with synchronized_errors(context.process_group, "opening the data"):
            rows = context.evaluation_rows()[1] if dataset is None else context.open_dataset(dataset)
        tuner = self._tuner = self.new_tuner(pipeline, fresh=fresh)
        # The weight of bad answers, which a saved model may not have recorded, does not change what a batch takes.
        objective = evaluation_objective(context.config, undesirable_weight=1.0)
        sizes = answering_sizes(pipeline, rows, tuner=tuner, objective=objective)
        tuner.fresh = False  # later verbs use the sizes found now
        return sizes

    def tune_training(self, dataset: Any, *, fresh: bool) -> BatchSizes:
        """Return the batch sizes that `train` would choose; writes only the cache of measured sizes."""
        context = self.context
        context.refuse_code("training")
        trainer = build_trainer(
            context.config.trainer, folder=context.loaded.folder, objective=default_objective(context.config)
        )
        with synchronized_errors(context.process_group, "opening the data"):
            data = context.open_data(dataset)
            labels = find_labels(context.config, data.training)
        with main_process_first(context.process_group, "loading the model"):
            pipeline = self.build_pipeline(labels, data.training, trainable=True)
        return find_sizes(trainer, pipeline, data, tuner=self.new_tuner(pipeline, fresh=fresh))

    def save(self, folder: Path, *, origin: Path | None) -> None:
        """Write the model with the metadata for `Model.load`."""
        pipeline = self.pipeline()
        pipeline.lm.save(folder)
        notes = notes_of(self.context.run)
        write_metadata(folder, config=self.context.config, labels=pipeline.labels, origin=origin, notes=notes)

    def export(self, options: ExportOptions) -> ExportReport:
        """Export the model and compare it with the export; see `Model.export`."""
        self.check_model("export")
        self.context.check_single_process()
        rows = partial(self.context.rows_to_compare, options.dataset)
        return export_model(self.pipeline, options, rows=rows, run=self.context.run)
