"""Datasets of a training run: rows checked and tokenized, their batching, and the loader."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from partita.data.batching.collate import build_collate, collate_parts
from partita.data.batching.cursor import batching_parts
from partita.data.describe import DataPlan
from partita.data.dialogue import expanded
from partita.data.ledger import LOSS_TOKENS_FOR_A_SHARE, Ledger
from partita.data.loader import Loader
from partita.data.rows import Rows
from partita.data.run_data import RunData, TrainingStreams
from partita.data.sources.mixed import mixed_order
from partita.data.splits import TRAINING
from partita.data.streams.loader import StreamLoader, count_shard_groups
from partita.data.streams.shard_group import CHUNK
from partita.data.tokenized import TokenizedDataset
from partita.generation.predict import READING_IS_SHOWN, ShowProgress
from partita.pipeline.build import Pipeline
from partita.pipeline.eval_dataset import EvalDataset, build_eval_dataset
from partita.pipeline.training_shape import TrainingShape, separates_rows, training_shape
from partita.training.plan import chunks_of, plan_rows, plan_streams
from partita_schema.sections.trainer import NoTrainer
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingDatasets:
    """The datasets of a run, checked and tokenized once."""

    training: TokenizedDataset | None
    """Training rows; of streams, the first rows. None if nothing is trained or there are none."""
    shape: TrainingShape | None
    """How the training rows are batched."""
    eval_datasets: dict[str, EvalDataset]
    """Evaluation datasets, by split."""
    order_parts: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the row order of mixed sources."""
    streams: TrainingStreams | None = None
    """The streams that training rows are read from during training, if any."""


def build_training_datasets(
    pipeline: Pipeline,
    data: RunData,
    ledger: Ledger,
    *,
    progress: ShowProgress | None = None,
    ranks: int = 1,
    recorded_batches: int | None = None,
) -> TrainingDatasets:
    """Check and tokenize all rows of a run except those of streams.

    Args:
        pipeline: The parts of the run.
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
    training = None
    if trains and data.streams is not None:
        training = encode_first(pipeline, data)
    elif trains and TRAINING in data.splits:
        training = encode_training(pipeline, data.splits[TRAINING], ledger, progress=progress)
    eval_datasets = {
        split: build_eval_dataset(pipeline, rows, split=split, ledger=ledger)
        for split, rows in data.splits.items()
        if split != TRAINING or (isinstance(config.trainer, NoTrainer) and TRAINING in config.trainer.evaluate)
    }
    if training is None:
        return TrainingDatasets(None, None, eval_datasets)
    training = chunks_of(config, training, pipeline.encoder)
    mixed = mixed_order(config.data, training.keys) if data.mixed and data.streams is None else None
    shape = training_shape(
        config,
        training,
        order=mixed.order if mixed is not None else None,
        more_rows=data.streams is not None,
        ranks=ranks,
        recorded_batches=recorded_batches,
        chunk_length=pipeline.encoder.chunk_length,
    )
    parts = mixed.parts if mixed is not None else {}
    return TrainingDatasets(training, shape, eval_datasets, order_parts=parts, streams=data.streams)


def encode_training(
    pipeline: Pipeline, rows: Rows, ledger: Ledger, *, progress: ShowProgress | None
) -> TokenizedDataset:
    """Tokenize the training rows.

    Args:
        pipeline: The parts of the run.
        rows: The training rows.
        ledger: Counts the rows that cannot be used.
        progress: Opens a progress display for large datasets.
    """
    expanded_rows = expanded(rows, pipeline.encoder.expander)
    shown = progress is not None and len(expanded_rows) >= READING_IS_SHOWN
    with progress(len(expanded_rows), "reading") if progress is not None and shown else nullcontext() as display:
        encode = TokenizedDataset.build if pipeline.tokens is None else pipeline.tokens.encode
        encoded = encode(
            expanded_rows,
            pipeline.encoder,
            ledger=ledger,
            options=pipeline.config.data.loader,
            progress=display.advance if display else None,
        )
    ledger.refuse_unknown_tokens(TRAINING)
    return encoded


def encode_first(pipeline: Pipeline, data: RunData) -> TokenizedDataset | None:
    """Tokenize the first rows of the streams, to estimate lengths. The ledger counts them later, during training."""
    if data.training is None:
        return None
    rows = expanded(data.training, pipeline.encoder.expander)
    options = pipeline.config.data.loader
    ledger = Ledger(None, max_bad_rows=1.0)
    encoded = TokenizedDataset.build(rows, pipeline.encoder, ledger=ledger, options=options, chunk=CHUNK)
    ledger.refuse_unknown_tokens(TRAINING, least=LOSS_TOKENS_FOR_A_SHARE)
    return encoded


def training_loader(
    pipeline: Pipeline,
    datasets: TrainingDatasets,
    ledger: Ledger,
    *,
    size: BatchSize | None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Loader | StreamLoader | None:
    """Return the loader of the training rows, or None if there are none. Log the data plan.

    Args:
        pipeline: The parts of the run.
        datasets: The datasets of the run.
        ledger: Counts the streamed rows that cannot be used.
        size: Batch size of training.
        process_group: The ranks that train.
    """
    if datasets.training is None or datasets.shape is None or size is None:
        return None
    size = datasets.shape.with_tokens(size)
    if datasets.streams is not None:
        return stream_loader(pipeline, datasets, datasets.streams, ledger, size=size, process_group=process_group)
    return index_loader(pipeline, datasets, datasets.training, size=size, process_group=process_group)


def index_loader(
    pipeline: Pipeline,
    datasets: TrainingDatasets,
    encoded: TokenizedDataset,
    *,
    size: BatchSize,
    process_group: ProcessGroup,
) -> Loader:
    """Return the loader of tokenized rows.

    Args:
        pipeline: The parts of the run.
        datasets: The datasets of the run.
        encoded: The tokenized training rows.
        size: Batch size of training.
        process_group: The ranks that train.
    """
    config, shape = pipeline.config, datasets.shape
    assert shape is not None
    pad_token_id = pipeline.lm.tokenizer.pad_token_id
    batches_per_step = shape.batches_per_step(config.trainer, size)
    loader = Loader(
        encoded,
        batching=shape.batching,
        batch_size=size.rows,
        max_tokens=size.max_tokens,
        batches_per_step=batches_per_step,
        seed=config.seed,
        pad_token_id=pad_token_id,
        order=shape.order,
        more_parts={**datasets.order_parts, **collate_parts(config.data.collate, folder=pipeline.folder)},
        collate_batch=build_collate(config.data.collate, folder=pipeline.folder, pad_token_id=pad_token_id),
        resume=config.data.resume,
        process_group=process_group,
    )
    log_plan(plan_rows(config, shape, size, loader))
    return loader


def stream_loader(
    pipeline: Pipeline,
    datasets: TrainingDatasets,
    streams: TrainingStreams,
    ledger: Ledger,
    *,
    size: BatchSize,
    process_group: ProcessGroup,
) -> StreamLoader:
    """Return the loader of streamed rows.

    Args:
        pipeline: The parts of the run.
        datasets: The datasets of the run, with the first rows of the streams.
        streams: The streams of training rows.
        ledger: Counts the rows that cannot be used.
        size: Batch size of training.
        process_group: The ranks that train.
    """
    config, shape = pipeline.config, datasets.shape
    assert shape is not None
    batches_per_step = shape.batches_per_step(config.trainer, size)
    policy = shape.policy(size.rows, max_tokens=size.max_tokens)
    num_groups = count_shard_groups(batches_per_step, sources=len(streams.sources))
    plan = streams.plan(policy, num_groups=num_groups, chunks=shape.chunks)
    log_plan(plan_streams(config, shape, size, plan))
    return StreamLoader(
        plan,
        pipeline.encoder,
        options=config.data.loader,
        batches_per_step=batches_per_step,
        parts=batching_parts(
            shape.batching,
            batch_size=size.rows,
            max_tokens=size.max_tokens,
            batches_per_step=batches_per_step,
            seed=config.seed,
        )
        | collate_parts(config.data.collate, folder=pipeline.folder),
        ledger=ledger,
        collate_batch=build_collate(
            config.data.collate, folder=pipeline.folder, pad_token_id=pipeline.lm.tokenizer.pad_token_id
        ),
        resume=config.data.resume,
        process_group=process_group,
    )


def log_plan(plan: DataPlan) -> None:
    """Log the data plan."""
    for line in plan.lines():
        logger.info("%s", line)
