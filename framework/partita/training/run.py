"""A training run inside its directory: load the model, tokenize, choose batch sizes, train."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from partita.data.ledger import Ledger
from partita.data.run_data import RunData
from partita.data.splits import TRAINING, VALIDATION
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import Pipeline
from partita.pipeline.eval_dataset import remove_tokens, tokens_made_once
from partita.pipeline.evaluate import LocalEvaluator
from partita.pipeline.tune import run_sizes
from partita.runs.directory import RunDirectory
from partita.runs.waiting import waiting
from partita.training.base_evaluation import evaluate_base
from partita.training.datasets import TrainingDatasets, build_training_datasets, training_loader
from partita.training.evaluations import Evaluations
from partita.training.recorded_data import length_histograms, write_samples
from partita_schema.base import is_set
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, ResumeError
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Trainer, TrainerContext, TrainResult
from partita_trainers.batch_size.cache import Cache
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.objective import objective_of
from partita_trainers.process_group import ProcessGroup, main_process_first, synchronized_errors

logger = logging.getLogger(__name__)

MIN_WAIT_SECONDS = 10.0
"""Seconds spent waiting for rows above which a warning is logged."""
LONG_WAIT = 0.1
"""Share of the time spent waiting above which a warning is logged."""


def train_in(
    directory: RunDirectory,
    data: RunData,
    *,
    trainer: Trainer,
    process_group: ProcessGroup,
    assemble: Callable[[Path], Pipeline],
    callbacks: Sequence[object] = (),
) -> tuple[Pipeline, BatchSizeTuner, TrainResult]:
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
    tuner = BatchSizeTuner(pipeline, cache=Cache.of_user(), process_group=process_group)
    with tokens_made_once(process_group, pipeline, folder=folder) as parts:
        result = run_trainer(
            trainer, parts, data, directory, tuner=tuner, process_group=process_group, callbacks=callbacks
        )
    return pipeline, tuner, result


def run_trainer(
    trainer: Trainer,
    pipeline: Pipeline,
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
        pipeline: The parts of the run.
        data: The rows of the run.
        directory: The open run.
        tuner: The batch-size tuner.
        process_group: The ranks that train.
        callbacks: Objects that the trainer calls, on rank 0.
    """
    config = pipeline.config
    streamed = data.streams is not None
    datasets, ledger = build_datasets(pipeline, data, directory, process_group=process_group)
    if process_group.rank == 0 and VALIDATION not in datasets.eval_datasets:
        note_missing_validation(config)
    recorded = recorded_sizes(directory, datasets)
    sizes = run_sizes(
        trainer, pipeline, tuner, shape=datasets.shape, eval_datasets=datasets.eval_datasets, recorded=recorded
    )
    planned = training_loader(pipeline, datasets, ledger, size=sizes.training, process_group=process_group)
    loader = None if planned is None else planned.loader
    if datasets.shape is not None and sizes.training is not None:
        directory.note(batches_per_step=datasets.shape.batches_per_step(config.trainer, sizes.training))
    note_work(directory, pipeline, data, ledger, batch_sizes={**sizes.records(), **recorded})
    record_data(directory, pipeline, data, datasets, process_group=process_group)

    mixed_data = config.data if data.mixed else None
    evaluator = LocalEvaluator(pipeline, tuner, sizes=sizes, mixed_data=mixed_data, objective=objective_of(trainer))
    evaluations = Evaluations(evaluator, datasets.eval_datasets, directory)
    evaluate_base(evaluations, planned)
    context = TrainerContext(
        config=config,
        lm=pipeline.lm,
        batches=loader,
        evaluate=evaluations,
        splits=tuple(split for split in data.record() if split == TRAINING or split in datasets.eval_datasets),
        run=directory,
        device=pipeline.lm.device,
        process_group=process_group,
        callbacks=callbacks,
    )
    try:
        with tuner.guard(sizes.training) if sizes.training is not None else nullcontext():
            result = trainer.train(context)
        if streamed:
            ledger.check()
        if loader is not None:
            note_batches(directory, loader.statistics, workers=config.data.loader.workers, streamed=streamed)
    finally:
        note_cuts(directory, tuner, sizes)
        if streamed:  # streamed rows are checked while training reads them
            ledger.save()
            note_left_out(directory, ledger)
            log_left_out(ledger, directory)
    if config.trainer.type == "custom":
        process_group.run_on_rank_zero(lambda: save_unless_saved(pipeline, directory.folder / "model"), "the model")
    return result


def note_missing_validation(config: Config) -> None:
    """Log what a run without validation rows cannot do: a warning for keys that have no effect."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or trainer.skip_all_evaluation:
        return
    keys = [f"trainer.{key}" for key in ("validation_metric", "early_stop") if is_set(trainer, key)]
    if keys:
        logger.warning(
            "there are no validation rows: %s and restore_best have no effect, and the last weights are the result; "
            "write data.validation, or a data.split with a share for validation",
            ", ".join(keys),
        )
    elif trainer.restore_best:
        logger.info("there are no validation rows: the last weights are the result")


def build_datasets(
    pipeline: Pipeline, data: RunData, directory: RunDirectory, *, process_group: ProcessGroup
) -> tuple[TrainingDatasets, Ledger]:
    """Check and tokenize the rows of a run. Return its datasets, and the ledger of the rows left out.

    Args:
        pipeline: The parts of the run.
        data: The rows of the run.
        directory: The open run.
        process_group: The ranks that train.
    """
    # Every rank counts all rows; rank 0 writes the quarantine.
    quarantine_folder = directory.folder if process_group.rank == 0 else None
    max_bad_rows = pipeline.config.data.max_bad_rows
    ledger = Ledger(quarantine_folder, max_bad_rows=max_bad_rows, resumable=data.streams is not None)
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


def save_unless_saved(pipeline: Pipeline, folder: Path) -> None:
    """Save the model if a custom trainer has not saved it."""
    if not folder.is_dir():
        pipeline.lm.save(folder)


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


def check_same_rows(directory: RunDirectory, data: RunData) -> None:
    """Raise ResumeError if a finished run was trained on other rows."""
    trained_on = directory.manifest.get("data", {}).get("training", {}).get("fingerprint")
    if data.training is not None and trained_on not in (None, data.training.fingerprint):
        raise ResumeError(
            f"the run in {directory.folder} is finished, and it was trained on other rows; "
            "give this run another folder with --run"
        )


def note_batches(directory: RunDirectory, totals: dict[str, float], *, workers: int, streamed: bool) -> None:
    """Record batch statistics since the last start, and warn if the loader was too slow.

    Args:
        directory: The open run.
        totals: Statistics of the loader.
        workers: Number of data workers.
        streamed: Whether rows are read during training.
    """
    directory.note(batches=totals)
    if streamed and totals["waited_seconds"] > MIN_WAIT_SECONDS and totals["wait_share"] > LONG_WAIT:
        logger.warning(
            "%.0f %% of the time was spent waiting for rows: write data.loader.workers: %d, or more",
            *(100 * totals["wait_share"], max(2, 2 * workers)),
        )


def recorded_sizes(directory: RunDirectory, datasets: TrainingDatasets) -> dict[str, Any]:
    """Return the batch sizes that the run started with; not that of training if longer rows were added since."""
    recorded: dict[str, Any] = directory.manifest.get("batch_sizes", {}) if directory.has_checkpoints else {}
    measured = recorded.get("training", {}).get("prompt_tokens")
    if datasets.shape is not None and measured is not None and datasets.shape.longest > measured:
        return {name: record for name, record in recorded.items() if name != "training"}
    return recorded


def note_cuts(directory: RunDirectory, tuner: BatchSizeTuner, sizes: BatchSizes) -> None:
    """Record the reduced training batch size after an out-of-memory error, also for later runs."""
    cuts = directory.manifest.get("out_of_memory")
    if cuts and sizes.training is not None and not sizes.training.out_of_memory:
        cut = tuner.training_was_cut(sizes.training, rows=rows_that_fitted(sizes.training, cuts[-1]))
        directory.note(batch_sizes={**directory.manifest["batch_sizes"], "training": cut.record()})


def rows_that_fitted(size: BatchSize, cut: Mapping[str, int]) -> int:
    """Return the batch size that fitted; with a token budget, convert from many short rows to the longest."""
    rows, tokens, longest = int(cut["now"]), int(cut["tokens"]), size.prompt_tokens
    return rows if size.max_tokens is None or longest is None else max(1, rows * tokens // longest)


def check_shared(trainer: Trainer, config: Config, process_group: ProcessGroup) -> None:
    """Raise ConfigError if a custom trainer would train each process of a group separately."""
    if (
        process_group.world_size > 1
        and config.trainer.type == "custom"
        and not getattr(trainer, "sums_gradients", False)
    ):
        name = type(trainer).__name__
        message = (
            f"{name} would train each of {process_group.world_size} processes by itself: sum its gradients with "
            "context.process_group.all_reduce_sum_ and "
            "say so in the class by sums_gradients = True, or start one process"
        )
        raise ConfigError([Problem("trainer.target", message)])


def find_sizes(trainer: Trainer, pipeline: Pipeline, data: RunData, *, tuner: BatchSizeTuner) -> BatchSizes:
    """Return the batch sizes that a run would start with.

    Args:
        trainer: The trainer.
        pipeline: The parts of the run.
        data: The rows of the run.
        tuner: The batch-size tuner.
    """
    ledger = Ledger(None, max_bad_rows=pipeline.config.data.max_bad_rows)
    with synchronized_errors(tuner.process_group, "reading the rows"):
        datasets = build_training_datasets(pipeline, data, ledger, ranks=tuner.process_group.world_size)
    return run_sizes(trainer, pipeline, tuner, shape=datasets.shape, eval_datasets=datasets.eval_datasets, recorded={})


def log_left_out(ledger: Ledger, directory: RunDirectory) -> None:
    """Log the number of rows left out and truncated, the path of the quarantine, and warnings of the ledger."""
    ledger.log_warnings()
    for split, counts in ledger.splits.items():
        if counts.left_out:
            details = (split, counts.left_out, counted(counts.rows, "row"), counts.reasons.most_common(1)[0][0])
            logger.warning("%s: %d of %s left out (%s); see %s", *details, directory.folder / "quarantine.jsonl")
        if counts.cut:
            cut, lost = counted(counts.cut, "row"), counted(counts.cut_tokens, "token")
            logger.warning("%s: %s cut to the length limit, %s lost", split, cut, lost)


def record_data(
    directory: RunDirectory,
    pipeline: Pipeline,
    data: RunData,
    datasets: TrainingDatasets,
    *,
    process_group: ProcessGroup,
) -> None:
    """Record the lengths of the rows and samples of the training rows.

    Args:
        directory: The open run.
        pipeline: The parts of the run.
        data: The rows of the run.
        datasets: The same rows, tokenized.
        process_group: The ranks that train; rank 0 writes.
    """
    directory.note(lengths=length_histograms(datasets))
    training = datasets.training
    if training is not None:
        write = partial(write_samples, directory.folder, pipeline, data, training.encoded)
        process_group.run_on_rank_zero(write, "samples of the training rows")


def note_left_out(directory: RunDirectory, ledger: Ledger) -> None:
    """Record the number of rows left out, by split."""
    directory.note(ledger={split: counts.left_out for split, counts in ledger.splits.items()})


def note_work(
    directory: RunDirectory,
    pipeline: Pipeline,
    data: RunData,
    ledger: Ledger,
    *,
    batch_sizes: dict[str, Any],
) -> None:
    """Record in the manifest the device, data, labels, batch sizes and number of parameters.

    Args:
        directory: The open run.
        pipeline: The parts of the run.
        data: The rows of the run.
        ledger: Counts of the rows left out.
        batch_sizes: Records of the batch sizes, by purpose.
    """
    note_left_out(directory, ledger)
    directory.note(
        device=str(pipeline.lm.device),
        data=data.record(),
        labels={name: list(labels) for name, labels in pipeline.labels.items()},
        batch_sizes=batch_sizes,
        token_cache=pipeline.tokens.record() if pipeline.tokens is not None else {},
        parameters=sum(parameter.numel() for parameter in pipeline.lm.module.parameters()),
        trained_parameters=sum(p.numel() for p in pipeline.lm.module.parameters() if p.requires_grad),
    )
