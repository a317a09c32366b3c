"""The data plan of a run: batches, steps and padding, also before a model is loaded (`partita explain --data`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.data.dialogue import expanded
from partita.data.indexed_loader import IndexedLoader
from partita.data.labels import find_labels
from partita.data.ledger import Ledger, RowCounts, accepted_if_exceeded, reasons_in_words
from partita.data.run_data import RunData, open_run_data
from partita.data.splits import TRAINING
from partita.data.streams.shard_group import ShardPlan
from partita.data.streams.stream_loader import StreamLoader
from partita.data.tokenized import TokenizedDataset
from partita.data.training_rows import LoaderSetup, batch_rows, configured_row_tokenizer
from partita.data.training_shape import TrainingShape
from partita.lm.model_config.encoders import heads_of_encoder
from partita.training.data_plan import DataPlan, plan_of
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sections.trainer import DEFAULT_STEP_ROWS, FinetuneTrainer
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.schedule import planned_steps


@dataclass(frozen=True)
class FilePlan:
    """A data plan and the assumptions it was computed with."""

    plan: DataPlan
    assumed: str
    """Assumed batch size as text; empty if the file sets it."""
    bad_rows: str = ""
    """Training rows that cannot be used, as text; empty if there are none."""
    repeated_tokens: float = 0.0
    """See `TokenizedDataset.repeated_tokens`."""


def plan_of_file(config: Config, *, folder: Path, dataset: Any = None) -> FilePlan:
    """Compute the data plan of a configuration without loading the model.

    All training rows are read and tokenized; of a stream, only the first rows. An automatic batch size is assumed to
    be the 16 rows of a default step, or all rows if there are fewer; with packing or a token budget, the size whose
    batches have that many rows on average. Raises DataError if the file trains nothing.
    """
    config = heads_of_encoder(config, folder=folder)
    if not config.trains:
        raise DataError("nothing is trained with trainer: {type: none}, so there is no plan for its data")
    data = open_run_data(config, folder=folder, dataset=dataset)
    rows = data.training
    assert rows is not None
    row_tokenizer = configured_row_tokenizer(config, rows, folder=folder, labels=find_labels(config, rows))
    expanded_rows = expanded(rows, row_tokenizer.expander)
    ledger = Ledger(None, max_bad_rows=1.0)
    encoded = TokenizedDataset.build(expanded_rows, row_tokenizer, ledger=ledger, options=config.data.loader)
    training = batch_rows(data, encoded, row_tokenizer)
    shape = training.shape
    size, assumed = size_of(config, shape)
    setup = LoaderSetup(
        config=config,
        rows=training,
        row_tokenizer=row_tokenizer,
        ledger=ledger,
        size=size,
        batches_per_step=shape.batches_per_step(config.trainer, size),
        folder=folder,
    )
    plan = plan_of_loader(config, shape, size, setup.open())
    return FilePlan(plan, assumed, describe_bad_rows(ledger.split(TRAINING), data, config), encoded.repeated_tokens)


def describe_bad_rows(counts: RowCounts, data: RunData, config: Config) -> str:
    """Return how many training rows cannot be used and why, and whether training would stop because of them."""
    if not counts.left_out:
        return ""
    streamed, limit = data.streams is not None, config.data.max_bad_rows
    of = "the first " if streamed else ""
    text = f"{counts.left_out:,} of {of}{counted(counts.rows, 'training row')} left out ({reasons_in_words(counts)})"
    total = counts.rows + sum(number for split, number in data.num_rows.items() if split != TRAINING)
    accepted = accepted_if_exceeded(counts.left_out, rows=total, max_bad_rows=limit)
    if accepted is None:
        return text
    # More rows of a stream may follow, which can make the share smaller.
    stops = "train stops at more" if streamed and isinstance(limit, float) else "train would stop"
    return f"{text}; data.max_bad_rows accepts {accepted}, and {stops}"


def plan_of_loader(
    config: Config, shape: TrainingShape, size: BatchSize, loader: IndexedLoader | StreamLoader
) -> DataPlan:
    """Compute the plan of a loader.

    Args:
        config: The configuration.
        shape: How the rows are batched; of streams, the first rows.
        size: The batch size.
        loader: The loader.
    """
    if isinstance(loader, StreamLoader):
        return plan_streams(config, shape, size, loader.plan)
    return plan_rows(config, shape, size, loader)


def plan_rows(config: Config, shape: TrainingShape, size: BatchSize, loader: IndexedLoader) -> DataPlan:
    """Compute the plan for rows that are already tokenized.

    Args:
        config: The configuration.
        shape: How the rows are batched.
        size: The batch size.
        loader: The loader of the rows.
    """
    return plan_of(
        shape.epoch_lengths,
        batching=shape.batching,
        policy=shape.policy(size.rows, max_tokens=size.max_tokens),
        batches_per_step=shape.batches_per_step(config.trainer, size),
        steps_per_epoch=loader.steps_per_epoch,
        steps=total_steps(config, loader),
        reason=shape.reason,
    )


def plan_streams(config: Config, shape: TrainingShape, size: BatchSize, plan: ShardPlan) -> DataPlan:
    """Compute the plan for streamed rows.

    Args:
        config: The configuration.
        shape: How the first rows are batched.
        size: The batch size.
        plan: The plan of the shards.
    """
    trainer = config.trainer
    return plan_of(
        shape.lengths,
        batching=shape.batching,
        policy=plan.policy,
        batches_per_step=shape.batches_per_step(trainer, size),
        steps=trainer.max_steps if isinstance(trainer, FinetuneTrainer) else None,
        shards=sum(len(stream.shards) for stream in plan.streams),
        shard_groups=plan.num_groups,
        reason=shape.reason,
    )


def size_of(config: Config, shape: TrainingShape) -> tuple[BatchSize, str]:
    """Return the batch size set in the file, or an assumed one with a sentence that says so."""
    user_set = shape.user_set if shape.counts_tokens else None
    if isinstance(config.trainer.batch_size, int):
        user_set = config.trainer.batch_size
    if user_set is not None:
        return shape.with_tokens(BatchSize(rows=user_set, origin="file", device="none")), ""
    assumed_rows = shape.max_rows_for(min(DEFAULT_STEP_ROWS, len(shape.lengths)))
    size = shape.with_tokens(BatchSize(rows=assumed_rows, origin="default", device="none"))
    size_text = counted(size.max_tokens, "token") if size.max_tokens is not None else counted(assumed_rows, "row")
    return size, f"batch_size is auto and found when the run begins (partita tune); taken as {size_text} here"


def total_steps(config: Config, loader: IndexedLoader) -> int | None:
    """Return the number of optimizer steps of the run; None if the trainer has other keys, such as a custom one."""
    return planned_steps(config.trainer, loader) if isinstance(config.trainer, FinetuneTrainer) else None
