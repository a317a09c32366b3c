"""Messages between a worker pool and its workers, and the interface that exchanges them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from partita.backends.ray.event_queue import LogMessage
from partita.backends.ray.work_items import WorkItem
from partita.generation.requests import BatchResult
from partita.lm.base import AnswerContext, GenerationOptions
from partita_schema.config import Config
from partita_trainers.batch_size.probe import BatchSize

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class LoadRequest:
    """What a worker loads."""

    config: Config
    folder: Path
    """Folder that relative paths of the file are resolved against."""
    tokenizer: "PreTrainedTokenizerFast | None"
    """Tokenizer of a new model; None if it is saved with the weights."""
    saved: Path | None
    """Folder of the trained weights, if there is one."""
    labels: Mapping[str, tuple[str, ...]]
    """Labels by output, for a head."""
    threads: str
    """OMP_NUM_THREADS of the command; empty if it is not set."""


@dataclass(frozen=True)
class WorkerLocation:
    """Machine and process of a worker."""

    node: str
    """Name of the machine."""
    process: int


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a loaded model; equal on all workers."""

    fingerprint: str
    context_length: int | None
    answer_context: AnswerContext | None
    checkpoint_generation: Mapping[str, Any]
    """Content of the checkpoint's generation_config.json."""
    vocabulary_size: int
    """Number of logits per position."""
    head_labels: tuple[str, ...] | None
    """Labels of the model's head in its order; None without a head."""


@dataclass(frozen=True)
class Offer:
    """How many rows a worker's device fits."""

    size: BatchSize
    token_budget: int | None
    """Total tokens of rows that fit, if memory determined the size."""


@dataclass(frozen=True)
class WorkerJob:
    """Description of a job; its rows follow."""

    number: int
    """Increasing number of the job."""
    engine: str
    options: GenerationOptions
    max_new_tokens: int
    seed: int
    rows: int
    """Number of rows in the dataset."""
    batch_size: int
    size: BatchSize | None
    """The measured batch size; None if it was not measured."""
    token_budget: int | None
    prefix: Sequence[int]
    """Tokens that all prompts begin with."""
    num_samples: int
    """How many consecutive rows have the same prompt."""
    prefix_groups: "npt.NDArray[np.int32] | None"
    """Number of the prefix group of each row, whose prompts begin alike, -1 without one; None if there are none."""


@dataclass(frozen=True)
class WorkerReplied:
    """A worker has finished a call."""

    worker: int
    method: str
    value: Any


@dataclass(frozen=True)
class WorkerReported:
    """A worker has results of its job, or a log message."""

    worker: int
    report: BatchResult | LogMessage


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has finished its job, and all its results have been reported."""

    worker: int


@dataclass(frozen=True)
class WorkerLost:
    """A worker is gone and sends no more events."""

    worker: int
    reason: str


@dataclass(frozen=True)
class WorkerFailed:
    """A worker raised an error that does not concern a single row."""

    worker: int
    error: Exception


Event = WorkerReplied | WorkerReported | WorkerEnded | WorkerLost | WorkerFailed


class WorkerBackend(Protocol):
    """Starts workers and sends them messages. Only `events` waits; it returns each worker's events in order.

    Each worker is a `partita.backends.ray.worker.Worker` in a separate process.
    """

    def start(self) -> int:
        """Start a worker and return its number; it replies to the call `where` once it has started."""

    def ask(self, worker: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the worker; `WorkerReplied` holds the result."""

    def start_job(self, worker: int, worker_job: WorkerJob) -> None:
        """Start a job; the worker answers the rows that are submitted to it."""

    def submit(self, worker: int, number: int, work_items: Sequence[WorkItem]) -> None:
        """Send rows of the job with this number."""

    def end(self, worker: int, number: int, *, now: bool) -> None:
        """Announce that no more rows follow; with `now`, the worker skips rows not yet started."""

    def stop(self, worker: int) -> None:
        """Kill the worker's process and forget the worker."""

    def events(self, timeout_seconds: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout_seconds` for the first one.

        The loss of a working worker is reported after all its results.
        """

    def resources(self) -> Mapping[str, float]:
        """Return the total resources for workers."""
