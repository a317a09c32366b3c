"""The interface that starts workers and exchanges messages with them, and its events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from partita.backends.ray.messages import LogMessage, WorkerJob
from partita.backends.ray.work_items import WorkItem
from partita.generation.results import BatchResult


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
    found: BatchResult | LogMessage


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

    def ask(self, worker: int, method: str, *given: Any, **named: Any) -> None:
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
