"""The verbs on Ray: `backend: {type: ray}`."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from partita.backends.ray.cluster import RayRankLauncher, RayWorkerBackend
from partita.backends.ray.messages import LoadRequest
from partita.backends.ray.rank_monitor import follow
from partita.backends.ray.worker_pool import WorkerPool
from partita.data.batching.evaluation_batches import EvaluationBatches
from partita.data.rows import Rows
from partita.data.tokenized import TokenizedDataset
from partita.distributed.world import get_world
from partita.generation.oom_backoff import BatchLimit, Capacity
from partita.generation.predict import ShowProgress
from partita.pipeline.build import Labels, RayPipeline, build_ray_pipeline
from partita.pipeline.evaluate import EvalDataset, score
from partita.pipeline.tune import asked_prompts, most_learned
from partita.runs.files import writing
from partita_schema.backend import RayBackend
from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.errors import PartitaError
from partita_schema.model import ScratchModel
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import BatchSize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

INSTEAD = {
    "train with trainer: {type: none}": "evaluate scores rows with the workers",
    "tune": "the workers find their sizes themselves; remove backend for those of this process",
    "generate": "remove backend for a few texts, or predict a data set",
    "save": "remove backend: this process does not hold the model",
}
"""What to do instead, by verb."""


def is_on_ray(config: Config) -> bool:
    """Return whether Ray workers hold the model."""
    return isinstance(config.backend, RayBackend)


def refuse_on_ray(config: Config, *, verb: str) -> None:
    """Raise PartitaError if Ray workers hold the model; `verb` is one that they do not support."""
    if is_on_ray(config):
        raise PartitaError(f"backend: {{type: ray}} does not {verb}: {INSTEAD[verb]}")


def check_is_alone() -> None:
    """Raise PartitaError if this process was started as one of several."""
    if get_world().world_size > 1:
        raise PartitaError(
            f"backend: {{type: ray}} starts the processes itself, and here are {get_world().world_size}; start the "
            "command "
            "by itself, or remove backend"
        )


def done_by_ranks(
    work: Callable[[], Any], config: Config, *, quiet: bool, storage: Path, again: str = "at the newest checkpoint"
) -> Any:
    """Run `work` on every Ray rank and return rank 0's result. If a rank is lost, all ranks are restarted.

    Args:
        work: Called on each rank.
        config: The configuration, with `backend: {type: ray}`.
        quiet: Show no progress.
        storage: Folder for Ray's files.
        again: Where restarted ranks continue, for the log.
    """
    backend = config.backend
    if not isinstance(backend, RayBackend):
        raise AssertionError("only a file with backend: {type: ray} has ranks on Ray")
    ranks = RayRankLauncher(
        backend,
        work,
        device=config.model_parameters.device,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        quiet=quiet,
        storage=storage,
    )
    return follow(
        ranks,
        workers=ranks.workers,
        max_failures=backend.max_failures,
        timeout_seconds=backend.timeout_seconds,
        quiet=quiet,
        again=again,
    )


def begin_where_started(start: Path, *, folder: Path, mark: Path, option: str) -> None:
    """Change to the folder where the command was started.

    Args:
        start: The folder where the command was started.
        folder: The folder of the run.
        mark: The marker folder of `seen_by_all`.
        option: The option that names the folder, for the error.

    Raises:
        PartitaError: The marker does not exist on this machine: the folder of the run is not shared.
    """
    if not mark.is_dir():
        raise PartitaError(
            f"the folder of the run, {folder}, is another one on {get_world().node}: name one with {option} that all "
            "machines of the cluster see under this name"
        )
    if start.is_dir():
        os.chdir(start)


@contextmanager
def seen_by_all(folder: Path) -> Iterator[Path]:
    """Create the folder of a run, and yield a marker folder in it by which other machines recognize it."""
    mark = folder.resolve() / f".ray-{uuid4().hex}"
    with writing(folder):
        mark.mkdir()
    try:
        yield mark
    finally:
        shutil.rmtree(mark, ignore_errors=True)
        with suppress(OSError):  # the folder is empty if nothing was written
            folder.rmdir()


def build_pipeline_on_ray(
    config: Config, *, folder: Path, labels: Labels, training: Rows | None, saved: Path | None
) -> RayPipeline:
    """Build the pipeline of a run and start its Ray workers.

    Args:
        config: The configuration, with `backend: {type: ray}`.
        folder: Folder that relative paths of the file are resolved against.
        labels: Labels by category output.
        training: Training rows, if anything needs them.
        saved: Folder of the trained weights, or None.

    Raises:
        ConfigError: Ray is not installed.
    """
    backend = config.backend
    if not isinstance(backend, RayBackend):
        raise AssertionError("only a file with backend: {type: ray} has its model on Ray")
    worker_backend = RayWorkerBackend(backend, device=config.model_parameters.device)

    def start(tokenizer: "PreTrainedTokenizerFast") -> WorkerPool:
        new = isinstance(config.base_model, ScratchModel) and saved is None
        order = LoadRequest(
            config=config,
            folder=folder.resolve(),
            tokenizer=tokenizer if new else None,
            saved=None if saved is None else saved.resolve(),
            threads=os.environ.get("OMP_NUM_THREADS", ""),
        )
        return WorkerPool(
            worker_backend,
            order,
            tokenizer=tokenizer,
            workers=worker_backend.workers,
            timeout_seconds=backend.timeout_seconds,
        )

    pipeline = build_ray_pipeline(config, start, folder=folder, labels=labels, training=training, saved=saved)
    workers = worker_backend.workers
    logger.info("%s with the model on Ray", counted(workers, "worker"))
    return pipeline


def fleet_capacity(pipeline: RayPipeline, lengths: np.ndarray, *, shared_tokens: int, rows: int | None) -> Capacity:
    """Return the rows that each worker generates at a time: `rows` if set, else what the smallest worker fits.

    Args:
        pipeline: The pipeline with the workers.
        lengths: Prompt lengths in tokens.
        shared_tokens: Length of the prefix that all prompts share, in tokens.
        rows: Rows at a time, set by the caller, or None.
    """
    offer = pipeline.lm.offer(
        pipeline.generation,
        lengths=lengths,
        shared_tokens=shared_tokens,
        rows=rows,
        max_new_tokens=pipeline.max_new_tokens,
    )
    size = offer.size
    return Capacity(size.rows, BatchLimit(size.rows), room_tokens=offer.room_tokens)


def evaluate_on_ray(
    pipeline: RayPipeline, examination: EvalDataset, *, rows: int | None, progress: ShowProgress
) -> dict[str, dict[str, float]]:
    """Compute metrics by output, and `loss` under the key `model`.

    Args:
        pipeline: The pipeline with the workers.
        examination: The dataset.
        rows: Batch size set by the caller, or None.
        progress: Opens a progress display.
    """
    loss = mean_loss_on_ray(pipeline, examination.encoded, rows=rows)
    lengths, shared = asked_prompts(pipeline, [examination.rows])
    capacity = fleet_capacity(pipeline, lengths, shared_tokens=shared, rows=rows)
    scores = score(pipeline, examination.rows, batch_size=capacity.rows, progress=progress)
    return {**{name: dict(values) for name, values in scores.outputs.items()}, "model": loss}


def mean_loss_on_ray(pipeline: RayPipeline, encoded: TokenizedDataset, *, rows: int | None) -> dict[str, float]:
    """Compute the same `loss` as `partita.pipeline.evaluate.mean_loss`: same batches, same order of summation."""
    pool = pipeline.lm
    offers: list[BatchSize] = pool.ask("evaluation_size", encoded.lengths, most_learned([encoded]), rows=rows)
    size = min(offers, key=lambda offer: offer.rows)
    batches = EvaluationBatches(encoded, batch_size=size.rows, pad_token_id=pool.tokenizer.pad_token_id)
    counts: list[int] = []

    def counted() -> Iterator[Batch]:
        for batch in batches:
            counts.append(batch.loss_tokens)
            yield batch

    sums = pool.each("loss", counted(), size=size)
    return {"loss": sum(sums) / sum(counts)} if sum(counts) else {}
