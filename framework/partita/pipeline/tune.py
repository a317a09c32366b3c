"""The batch sizes of a run: recorded by the run, or found before its first step."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.data.column_checks import has_answers
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.tokenized import TokenizedDataset
from partita.data.training_shape import TrainingShape
from partita.distributed.process_group import BUCKET_BYTES
from partita.generation.encoded_prompts import EncodedPrompts
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import LocalPipeline, Pipeline
from partita.pipeline.eval_dataset import EvalDataset, build_eval_dataset
from partita.pipeline.probes import countable_rows
from partita_schema.errors import ConfigError, Problem
from partita_schema.rows import row_schema
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import ProbeContext, Trainer
from partita_trainers.batch_size.probe import BatchSize, Probe
from partita_trainers.batch_size.probe_runner import ProbeRunner
from partita_trainers.batch_size.tune import warm_up
from partita_trainers.objective import Objective, objective_of
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)


def run_sizes(
    trainer: Trainer,
    pipeline: LocalPipeline,
    tuner: BatchSizeTuner,
    *,
    shape: TrainingShape | None,
    eval_datasets: Mapping[str, EvalDataset],
    recorded: Mapping[str, Any],
) -> BatchSizes:
    """Return the batch sizes of everything that a run does.

    Training is probed first. Evaluation and generation are then probed while the optimizer state is on the device, as
    they will run next to it.

    Args:
        trainer: The trainer.
        pipeline: The pipeline of the run.
        tuner: Finds batch sizes.
        shape: Lengths and batching of the training rows; None without training.
        eval_datasets: Evaluation datasets by name.
        recorded: Recorded sizes of a run that has taken steps, which are reused; otherwise empty.

    Raises:
        OutOfMemory: Not even one row fits.
        ConfigError: A custom trainer does not define a probe.
    """
    sizes = BatchSizes(**{name: BatchSize.from_record(record) for name, record in recorded.items()})
    needed = needs_probe(pipeline, recorded, trains=shape is not None)
    if shape is not None and needed:
        warm_up_all_reduce(tuner.process_group, device=pipeline.lm.device)
    with training_probe(trainer, pipeline, shape, needed=needed, process_group=tuner.process_group) as probe:
        if shape is not None and sizes.training is None:
            size = tuner.user_set("training", shape.user_set)
            if size is not None and shape.user_set is not None:
                size = replace(size, origin="max_tokens")
            if size is None and probe is not None:
                size = tuner.training(probe, shape)
            elif probe is not None:
                warm_up(ProbeRunner(probe, tuner.memory))
            elif size is None:
                message = f"auto needs a trainer that says what to probe: {type(trainer).__name__}.probe gave None"
                raise ConfigError([Problem("trainer.batch_size", f"{message}; write a number")])
            sizes = replace(sizes, training=None if size is None else shape.with_tokens(size))
        tuner.with_training_state = probe is not None
        try:
            return evaluation_sizes(pipeline, tuner, eval_datasets, sizes=sizes, objective=objective_of(trainer))
        finally:
            tuner.with_training_state = False


def warm_up_all_reduce(process_group: ProcessGroup, *, device: torch.device) -> None:
    """Run an all-reduce on a GPU, so that NCCL has allocated its buffers when batch sizes are measured.

    Probes run none; without this, the first training step would allocate the buffers.
    """
    if device.type != "cpu":
        process_group.all_reduce_sum_([torch.zeros(BUCKET_BYTES // 4, device=device)])


def needs_probe(pipeline: LocalPipeline, recorded: Mapping[str, Any], *, trains: bool) -> bool:
    """Return whether any size has to be found.

    Args:
        pipeline: The pipeline of the run.
        recorded: Records of known sizes by purpose; if rows became longer, all but that of training.
        trains: Whether there are training rows.
    """
    trainer = pipeline.config.trainer
    if recorded:
        return trains and "training" not in recorded and trainer.batch_size == "auto"
    return "auto" in (trainer.batch_size, trainer.eval_batch_size)


@contextmanager
def training_probe(
    trainer: Trainer, pipeline: LocalPipeline, shape: TrainingShape | None, *, needed: bool, process_group: ProcessGroup
) -> Iterator[Probe | None]:
    """Set up the trainer's probe in this context, if a size is to be found for training or next to it.

    Args:
        trainer: The trainer.
        pipeline: The pipeline of the run.
        shape: Lengths and batching of the training rows; None without training.
        needed: Whether any size has to be found.
        process_group: The ranks that probe together.
    """
    if shape is None or not needed:
        yield None
        return
    config, lm = pipeline.config, pipeline.lm
    longest, max_loss_tokens = shape.longest, shape.max_loss_tokens
    # One answer for all sizes: a size that is a whole step would otherwise take less memory than half of it.
    accumulates = shape.accumulates(config.trainer)
    held_bytes = sum(p.nbytes for p in lm.module.parameters() if p.requires_grad) if accumulates else 0

    def estimated_bytes(rows: int) -> int:
        activations = lm.estimated_bytes("training", rows, tokens=longest, new_tokens=0, loss_tokens=max_loss_tokens)
        return held_bytes + activations

    work = ProbeContext(
        config=config,
        lm=lm,
        device=lm.device,
        max_row_tokens=longest,
        max_loss_tokens=max_loss_tokens,
        token_ids=lm.token_ids,
        max_rows=countable_rows(shape.max_rows, vocabulary_size=lm.vocabulary_size, loss_tokens=max_loss_tokens),
        volume=shape.volume,
        estimated_bytes=estimated_bytes,
        packed=shape.separates_rows,
        streamed=shape.more_rows,
        accumulates=accumulates,
        process_group=process_group,
    )
    # A custom trainer may lack the method; evaluation is then probed without training state on the device.
    declare = getattr(trainer, "probe", None)
    with (declare(work) if declare is not None else None) or nullcontext() as probe:
        yield probe


def evaluation_sizes(
    pipeline: LocalPipeline,
    tuner: BatchSizeTuner,
    eval_datasets: Mapping[str, EvalDataset],
    *,
    sizes: BatchSizes,
    objective: Objective,
) -> BatchSizes:
    """Return `sizes` completed by those of evaluation and generation, if there are any.

    Args:
        pipeline: The pipeline of the run.
        tuner: Finds batch sizes.
        eval_datasets: Evaluation datasets by name.
        sizes: The sizes found so far.
        objective: What evaluations compute.
    """
    if not eval_datasets or evaluates_never(pipeline):
        return sizes
    sources = [eval_dataset.encoded for eval_dataset in eval_datasets.values()]
    if sizes.evaluation is None:
        lengths = np.concatenate([encoded.lengths for encoded in sources])
        sizes = replace(sizes, evaluation=tuner.evaluation(lengths, max_loss_tokens_of(sources), objective=objective))
    if sizes.generation is None and generates(pipeline):
        row_sources = [eval_dataset.rows for eval_dataset in eval_datasets.values()]
        lengths, shared = prompt_lengths(pipeline, row_sources, process_group=tuner.process_group)
        sizes = replace(sizes, generation=tuner.generation(lengths, shared_tokens=shared))
    return sizes


def answering_sizes(pipeline: LocalPipeline, rows: Rows, *, tuner: BatchSizeTuner, objective: Objective) -> BatchSizes:
    """Return the sizes for generation, if there are prompts, and for evaluation if the rows have answers.

    Args:
        pipeline: The pipeline for prediction.
        rows: The rows to answer.
        tuner: Finds batch sizes.
        objective: What evaluations compute.
    """
    sizes = BatchSizes()
    if not pipeline.config.plain_text:
        lengths, shared = prompt_lengths(pipeline, [rows], process_group=tuner.process_group)
        sizes = BatchSizes(generation=tuner.generation(lengths, shared_tokens=shared))
    if not has_answers(rows, pipeline.config):
        return sizes
    encoded = build_eval_dataset(pipeline, rows, split="test", ledger=Ledger(None, max_bad_rows=1.0)).encoded
    size = tuner.evaluation(encoded.lengths, max_loss_tokens_of([encoded]), objective=objective)
    return replace(sizes, evaluation=size)


def evaluates_never(pipeline: LocalPipeline) -> bool:
    """Return whether the config disables evaluation."""
    trainer = pipeline.config.trainer
    return isinstance(trainer, FinetuneTrainer) and trainer.skip_all_evaluation


def generates(pipeline: LocalPipeline) -> bool:
    """Return whether the run generates, in between or at its end."""
    trainer = pipeline.config.trainer
    if pipeline.config.plain_text:
        return False
    if not isinstance(trainer, FinetuneTrainer):
        return True
    return trainer.evaluate_generated is not False or trainer.validation_metric != "loss"


def prompt_lengths(
    pipeline: Pipeline, sources: Iterable[Rows], *, process_group: ProcessGroup = SINGLE_PROCESS
) -> tuple[np.ndarray, int]:
    """Return the prompt length of each answer in tokens (0 without a prompt), and the length of the shared prefix.

    A row has as many answers as the pipeline draws. The ranks of `process_group` share the work.
    """
    schema = row_schema(pipeline.config, supervised=False)
    prompts = [EncodedPrompts(rows, pipeline.row_tokenizer, schema, process_group=process_group) for rows in sources]
    lengths = np.concatenate([one.lengths for one in prompts])
    return np.repeat(lengths, pipeline.num_samples), min(len(one.prefix) for one in prompts)


def max_loss_tokens_of(sources: Sequence[TokenizedDataset]) -> int:
    """Return the maximum number of loss tokens of a row."""
    return max(int(encoded.loss_tokens.max(initial=0)) for encoded in sources)
