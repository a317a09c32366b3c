"""Datasets of a training run: rows checked and tokenized, their batching, and the loader."""

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from partita.data.dialogue import expanded
from partita.data.indexed_loader import IndexedLoader
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.run_data import RunData
from partita.data.splits import TRAINING
from partita.data.streams.stream_loader import StreamLoader
from partita.data.tokenized import TokenizedDataset
from partita.data.training_rows import LoaderSetup, TrainingRows, batch_rows, encode_first, encode_training
from partita.data.training_shape import TrainingShape
from partita.pipeline.build import LocalPipeline
from partita.pipeline.eval_dataset import EvalDataset, build_eval_dataset
from partita.runs.progress import READING_IS_SHOWN, ShowProgress
from partita.training.data_plan import DataPlan
from partita.training.plan import plan_of_loader
from partita_schema.common.text import counted
from partita_schema.errors import NoUsableRowsError
from partita_schema.sections.batching import separates_rows
from partita_schema.sections.trainer import FinetuneTrainer, NoTrainer, Trainer
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingDatasets:
    """The datasets of a run, checked and tokenized once."""

    training: TrainingRows | None
    """The training rows. None if nothing is trained or there are none."""
    eval_datasets: dict[str, EvalDataset]
    """Evaluation datasets, by split."""

    @property
    def shape(self) -> TrainingShape | None:
        """How the training rows are batched."""
        return None if self.training is None else self.training.shape


def build_training_datasets(
    pipeline: LocalPipeline,
    data: RunData,
    ledger: Ledger,
    *,
    progress: ShowProgress | None = None,
    ranks: int = 1,
    recorded_batches: int | None = None,
) -> TrainingDatasets:
    """Check and tokenize all rows of a run except those of streams.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        ledger: Counts the rows that cannot be used.
        progress: Opens a progress display.
        ranks: Number of ranks that share the micro-batches of a step.
        recorded_batches: Micro-batches per step of a run to resume.
    """
    config = pipeline.config
    trains = config.trains
    if trains:
        pipeline.lm.check_loss()
    if trains and separates_rows(config.data.batching):
        pipeline.lm.check_packing()  # checked before hours of reading
    encoded = None
    if trains and data.streams is not None:
        encoded = encode_first(data, pipeline.row_tokenizer)
    elif trains and TRAINING in data.splits:
        encoded = encode_with_progress(pipeline, data.splits[TRAINING], ledger, progress=progress)
    evaluated = {
        split: rows
        for split, rows in data.splits.items()
        if split != TRAINING or (isinstance(config.trainer, NoTrainer) and TRAINING in config.trainer.evaluate)
    }
    eval_datasets = build_eval_datasets(pipeline, evaluated, ledger)
    if encoded is None:
        return TrainingDatasets(None, eval_datasets)
    training = batch_rows(data, encoded, pipeline.row_tokenizer, ranks=ranks, recorded_batches=recorded_batches)
    return TrainingDatasets(training, eval_datasets)


def build_eval_datasets(pipeline: LocalPipeline, splits: Mapping[str, Rows], ledger: Ledger) -> dict[str, EvalDataset]:
    """Check and tokenize the rows of each split to evaluate on.

    A split is left out if all its labels are unknown, or if it was split off the training rows and none of its few rows
    can be used.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        splits: Rows by split.
        ledger: Counts the rows that cannot be used.

    Raises:
        DataError: There are too many bad rows, or no row of a source of its own can be used.
    """
    datasets = {}
    for split, rows in splits.items():
        try:
            datasets[split] = build_eval_dataset(pipeline, rows, split=split, ledger=ledger)
        except NoUsableRowsError as error:
            reason = str(error)
            if error.unknown_labels:
                reason = f"none of its {len(rows)} rows has a label of the training rows"
            elif split == TRAINING or getattr(pipeline.config.data, split) is not None:
                raise
            logger.warning("%s is not evaluated: %s", split, reason)
    return datasets


def encode_with_progress(
    pipeline: LocalPipeline, rows: Rows, ledger: Ledger, *, progress: ShowProgress | None
) -> TokenizedDataset:
    """Tokenize the training rows.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        rows: The training rows.
        ledger: Counts the rows that cannot be used.
        progress: Opens a progress display for large datasets.
    """
    expanded_rows = expanded(rows, pipeline.row_tokenizer.expander)
    shown = progress is not None and len(expanded_rows) >= READING_IS_SHOWN
    with progress(len(expanded_rows), "reading") if progress is not None and shown else nullcontext() as display:
        return encode_training(
            expanded_rows,
            pipeline.row_tokenizer,
            ledger,
            options=pipeline.config.data.loader,
            cache=pipeline.tokens,
            progress=display.advance if display else None,
        )


@dataclass(frozen=True)
class PlannedLoader:
    """The loader of the training rows."""

    loader: IndexedLoader | StreamLoader
    plan: DataPlan
    """How it reads and batches the rows."""
    size: BatchSize
    """The batch size."""

    @property
    def tokens(self) -> float:
        """Estimated number of tokens of all steps, padding included; infinite if nothing limits the steps."""
        plan = self.plan
        if plan.steps is None:
            return math.inf
        if plan.tokens is not None and plan.steps_per_epoch:
            of_step = plan.tokens / plan.steps_per_epoch
        else:
            rows = self.size.rows if self.size.max_tokens is None else self.size.max_tokens / plan.mean_tokens
            of_step = plan.mean_tokens * rows * plan.batches_per_step
        return plan.steps * of_step / (1 - plan.padding)


def training_loader(
    pipeline: LocalPipeline,
    datasets: TrainingDatasets,
    ledger: Ledger,
    *,
    size: BatchSize | None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> "PlannedLoader | None":
    """Return the loader of the training rows with its plan, which is logged; None if there are no training rows.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        datasets: The datasets of the run.
        ledger: Counts the streamed rows that cannot be used.
        size: Batch size of training.
        process_group: The ranks that train.
    """
    if datasets.training is None or size is None:
        return None
    config, shape = pipeline.config, datasets.training.shape
    size = shape.with_tokens(size)
    setup = LoaderSetup(
        config=config,
        rows=datasets.training,
        row_tokenizer=pipeline.row_tokenizer,
        ledger=ledger,
        size=size,
        batches_per_step=shape.batches_per_step(config.trainer, size),
        folder=pipeline.folder,
        process_group=process_group,
    )
    loader = setup.open()
    plan = plan_of_loader(config, shape, size, loader)
    log_plan(plan)
    if process_group.rank == 0:
        warn_of_other_steps(shape, config.trainer, size)
    if process_group.rank == 0 and isinstance(loader, IndexedLoader):
        warn_of_short_epochs(config.trainer, loader, batches_per_step=setup.batches_per_step)
    return PlannedLoader(loader, plan, size)


def warn_of_other_steps(shape: TrainingShape, trainer: Trainer, size: BatchSize) -> None:
    """Warn if a new run has other steps on several processes than on one, because each process needs a batch.

    Args:
        shape: How the rows of the run are batched.
        trainer: The section of the trainer.
        size: The batch size.
    """
    if shape.ranks == 1 or shape.recorded_batches is not None or not isinstance(trainer, FinetuneTrainer):
        return
    if trainer.gradient_accumulation_steps is not None:
        return
    alone = replace(shape, ranks=1).batches_per_step(trainer, size)
    batches = shape.batches_per_step(trainer, size)
    if alone != batches:
        logger.warning(
            "a step has %s on %s, and would have %s on one process, because each process takes equally many; with "
            "smaller batches the difference is smaller",
            counted(batches, "batch", "batches"),
            counted(shape.ranks, "process", "processes"),
            f"{alone:,}",
        )


def warn_of_short_epochs(trainer: Trainer, loader: IndexedLoader, *, batches_per_step: int) -> None:
    """Warn if a step accumulates more batches than an epoch has.

    Args:
        trainer: The trainer section.
        loader: The loader of the rows.
        batches_per_step: Batches per step over all ranks.
    """
    accumulated, there = getattr(trainer, "gradient_accumulation_steps", None), loader.batches_per_epoch
    if accumulated is not None and there < batches_per_step:
        logger.warning(
            "trainer.gradient_accumulation_steps is %s, so that a step takes %s, and an epoch has only %s: each epoch "
            "is one step of %s",
            f"{accumulated:,}",
            counted(batches_per_step, "batch", "batches"),
            f"{there:,}",
            counted(there, "batch", "batches"),
        )


def log_plan(plan: DataPlan) -> None:
    """Log the data plan."""
    for line in plan.lines():
        logger.info("%s", line)
