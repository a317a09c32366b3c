"""A training run inside its directory: load the model, tokenize, choose batch sizes, train."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from partita.data.ledger import Ledger
from partita.data.run_data import RunData
from partita.data.splits import TRAINING, VALIDATION
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import LocalPipeline
from partita.pipeline.eval_dataset import remove_tokens, tokens_made_once
from partita.pipeline.evaluate import LocalEvaluator
from partita.pipeline.tune import run_sizes
from partita.runs.directory import RunDirectory
from partita.runs.waiting import waiting
from partita.training.base_evaluation import evaluate_base
from partita.training.datasets import PlannedLoader, TrainingDatasets, build_training_datasets, training_loader
from partita.training.evaluations import Evaluations
from partita.training.notes import (
    check_labels,
    log_left_out,
    note_batches,
    note_branches,
    note_cuts,
    note_left_out,
    note_missing_validation,
    note_number_format,
    note_origin,
    note_waits,
    note_weights,
    note_work,
    record_data,
    recorded_sizes,
    warn_of_replaced_head,
    warn_of_replaced_mix,
    warn_of_single_labels,
    warn_of_slow_compilation,
)
from partita.training.trainer_result import check_result, plain_result, report_unless_reported, save_unless_saved
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, ResumeError
from partita_trainers.base import Trainer, TrainerContext, TrainResult
from partita_trainers.objective import objective_of
from partita_trainers.process_group import ProcessGroup, main_process_first, synchronized_errors


def train_in(
    directory: RunDirectory,
    data: RunData,
    *,
    trainer: Trainer,
    process_group: ProcessGroup,
    assemble: Callable[[Path], LocalPipeline],
    callbacks: Sequence[object] = (),
) -> tuple[LocalPipeline, BatchSizeTuner, TrainResult]:
    """Run training inside the run directory: load the model and train. The caller sets the final status.

    Args:
        directory: The open run.
        data: The rows of the run.
        trainer: The trainer.
        process_group: The ranks that train.
        assemble: Builds the pipeline; called with the folder in which the tokenizer of a new model is kept.
        callbacks: Objects that the trainer calls, on rank 0.
    """
    folder = directory.folder
    tokenizer = folder / "tokenizer"
    with main_process_first(process_group, "loading the model"):
        if process_group.rank == 0:
            remove_tokens(folder)
        if process_group.rank == 0 and not directory.has_checkpoints:
            shutil.rmtree(tokenizer, ignore_errors=True)  # left by a start without a checkpoint
        pipeline = assemble(tokenizer)
    with synchronized_errors(process_group, "the base model"):
        if process_group.rank == 0:
            note_origin(directory, pipeline)
            note_weights(directory, pipeline)
            note_number_format(directory, pipeline)
    tuner = BatchSizeTuner(pipeline, process_group=process_group)
    with tokens_made_once(process_group, pipeline, folder=folder) as shared:
        result = run_trainer(
            trainer, shared, data, directory, tuner=tuner, process_group=process_group, callbacks=callbacks
        )
    return pipeline, tuner, result


@dataclass(frozen=True)
class PreparedRun:
    """What a trainer needs: tokenized rows, batch sizes, and the batches of its steps."""

    datasets: TrainingDatasets
    ledger: Ledger
    """Counts of the rows left out."""
    sizes: BatchSizes
    planned: PlannedLoader | None
    """The loader of the training rows; None without any."""


def run_trainer(
    trainer: Trainer,
    pipeline: LocalPipeline,
    data: RunData,
    directory: RunDirectory,
    *,
    tuner: BatchSizeTuner,
    process_group: ProcessGroup,
    callbacks: Sequence[object],
) -> TrainResult:
    """Tokenize the rows, choose the batch sizes, and run the trainer.

    Args:
        trainer: The trainer.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        directory: The open run.
        tuner: The batch-size tuner.
        process_group: The ranks that train.
        callbacks: Objects that the trainer calls, on rank 0.
    """
    config = pipeline.config
    run = prepare_run(trainer, pipeline, data, directory, tuner=tuner, process_group=process_group)
    splits = run.datasets.eval_datasets
    mixed_data = config.data if data.mixed else None
    evaluator = LocalEvaluator(pipeline, tuner, sizes=run.sizes, mixed_data=mixed_data, objective=objective_of(trainer))
    evaluations = Evaluations(evaluator, splits, directory)
    evaluate_base(evaluations, run.planned)
    context = TrainerContext(
        config=config,
        lm=pipeline.lm,
        batches=None if run.planned is None else run.planned.loader,
        evaluate=evaluations,
        splits=tuple(split for split in data.record() if split == TRAINING or split in splits),
        run=directory,
        device=pipeline.lm.device,
        process_group=process_group,
        callbacks=callbacks,
        validation_rows=splits[VALIDATION].encoded.fingerprint if VALIDATION in splits else "",
    )
    result = train_and_note(trainer, context, run, directory, tuner=tuner, streamed=data.streams is not None)
    if config.trainer.type == "custom":
        report_unless_reported(result, directory)
        model = directory.folder / "model"
        save = partial(save_unless_saved, pipeline, model, trainer=trainer, steps=result.steps)
        process_group.run_on_rank_zero(save, "the model")
    return result


def prepare_run(
    trainer: Trainer,
    pipeline: LocalPipeline,
    data: RunData,
    directory: RunDirectory,
    *,
    tuner: BatchSizeTuner,
    process_group: ProcessGroup,
) -> PreparedRun:
    """Tokenize the rows, choose the batch sizes, plan the batches, and note all of this in the manifest.

    Args:
        trainer: The trainer.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        directory: The open run.
        tuner: The batch-size tuner.
        process_group: The ranks that train.
    """
    config = pipeline.config
    if process_group.rank == 0:
        warn_of_replaced_mix(config, data)
        warn_of_single_labels(config, pipeline.labels)
        warn_of_slow_compilation(pipeline)
        if not directory.has_checkpoints:
            warn_of_replaced_head(pipeline)
    datasets, ledger = build_datasets(pipeline, data, directory, process_group=process_group)
    if process_group.rank == 0 and VALIDATION not in datasets.eval_datasets:
        note_missing_validation(config)
    earlier = directory.manifest.get("metrics", {})
    if not earlier.keys() <= datasets.eval_datasets.keys():  # before the run was interrupted, a split had rows
        directory.note(metrics={split: found for split, found in earlier.items() if split in datasets.eval_datasets})
    check_labels(config, datasets, warns=process_group.rank == 0)
    recorded = recorded_sizes(directory, datasets)
    sizes = run_sizes(
        trainer, pipeline, tuner, shape=datasets.shape, eval_datasets=datasets.eval_datasets, recorded=recorded
    )
    planned = training_loader(pipeline, datasets, ledger, size=sizes.training, process_group=process_group)
    if datasets.shape is not None and sizes.training is not None:
        directory.note(batches_per_step=datasets.shape.batches_per_step(config.trainer, sizes.training))
    note_branches(directory, pipeline, datasets)
    note_work(directory, pipeline, data, ledger, batch_sizes={**sizes.records(), **recorded})
    record_data(directory, pipeline, data, datasets, process_group=process_group)
    return PreparedRun(datasets, ledger, sizes, planned)


def train_and_note(
    trainer: Trainer,
    context: TrainerContext,
    run: PreparedRun,
    directory: RunDirectory,
    *,
    tuner: BatchSizeTuner,
    streamed: bool,
) -> TrainResult:
    """Run the trainer, and note sums over its steps, waits for rows, out-of-memory errors, and rows left out.

    Args:
        trainer: The trainer.
        context: What the trainer works with.
        run: The prepared run.
        directory: The open run.
        tuner: The batch-size tuner.
        streamed: Whether rows are read, and checked, while training.

    Raises:
        ConfigError: The trainer has returned something other than a result.
    """
    size, ledger = run.sizes.training, run.ledger
    try:
        with tuner.guard(size) if size is not None else nullcontext():
            result = trainer.train(context)
        check_result(result, trainer)
        result = plain_result(result)
        if streamed:
            ledger.check()
        if context.process_group.rank == 0:
            note_batches(directory)
        if run.planned is not None and context.config.trainer.type != "hogwild":  # it reads the rows once, before
            workers = context.config.data.loader.workers
            note_waits(directory, run.planned.loader.waits, workers=workers, streamed=streamed)
    finally:
        note_cuts(directory, tuner, run.sizes)
        if streamed:
            ledger.save()
            note_left_out(directory, ledger)
            log_left_out(ledger, directory)
    return result


def build_datasets(
    pipeline: LocalPipeline, data: RunData, directory: RunDirectory, *, process_group: ProcessGroup
) -> tuple[TrainingDatasets, Ledger]:
    """Check and tokenize the rows of a run. Return its datasets, and the ledger of the rows left out.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        directory: The open run.
        process_group: The ranks that train.
    """
    # Every rank counts all rows; rank 0 writes the quarantine.
    quarantine_folder = directory.folder if process_group.rank == 0 else None
    max_bad_rows = pipeline.config.data.max_bad_rows
    resumable = data.streams is not None
    ledger = Ledger(quarantine_folder, max_bad_rows=max_bad_rows, num_rows=data.num_rows, resumable=resumable)
    with synchronized_errors(process_group, "reading the rows"), waiting("reading the rows", line=False):
        datasets = build_training_datasets(
            pipeline,
            data,
            ledger,
            progress=directory.progress,
            ranks=process_group.world_size,
            recorded_batches=directory.manifest.get("batches_per_step") if directory.has_checkpoints else None,
        )
    log_left_out(ledger, directory)
    return datasets, ledger


def finished_result(directory: RunDirectory) -> TrainResult:
    """Return the result of a run that was finished earlier."""
    manifest = directory.manifest
    return TrainResult(
        run=directory.folder,
        metrics=manifest.get("metrics", {}),
        steps=manifest.get("steps", 0),
        stopped_early=manifest.get("stopped_early", False),
        batch_sizes=manifest.get("batch_sizes", {}),
        dialogues=manifest.get("dialogues", []),
    )


def check_same_rows(directory: RunDirectory, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ResumeError if a finished run was trained or evaluated on other rows.

    Args:
        directory: The run.
        found: The record of the rows that it is started with, by split.
    """
    recorded = directory.manifest.get("data", {})
    others = [
        split for split, rows in recorded.items() if rows["fingerprint"] != found.get(split, {}).get("fingerprint")
    ]
    if others:
        raise ResumeError(
            f"the run in {directory.folder} is finished, and it had other rows ({', '.join(others)}); start it with "
            "the same rows, or give this run another folder with --run"
        )


def check_sums_gradients(trainer: Trainer, config: Config, process_group: ProcessGroup) -> None:
    """Raise ConfigError if a custom trainer would train each process of a group separately."""
    if (
        process_group.world_size > 1
        and config.trainer.type == "custom"
        and not getattr(trainer, "sums_gradients", False)
    ):
        name = type(trainer).__name__
        message = (
            f"{name} would train each of {process_group.world_size} processes by itself: sum its gradients with "
            "context.process_group.all_reduce_sum_ and say so in the class by sums_gradients = True, or start one "
            "process"
        )
        raise ConfigError([Problem("trainer.target", message)])


def find_sizes(trainer: Trainer, pipeline: LocalPipeline, data: RunData, *, tuner: BatchSizeTuner) -> BatchSizes:
    """Return the batch sizes that a run would start with.

    Args:
        trainer: The trainer.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        tuner: The batch-size tuner.
    """
    ledger = Ledger(None, max_bad_rows=pipeline.config.data.max_bad_rows, num_rows=data.num_rows)
    with synchronized_errors(tuner.process_group, "reading the rows"):
        datasets = build_training_datasets(pipeline, data, ledger, ranks=tuner.process_group.world_size)
    return run_sizes(trainer, pipeline, tuner, shape=datasets.shape, eval_datasets=datasets.eval_datasets, recorded={})
