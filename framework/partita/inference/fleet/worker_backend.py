"""What starts a fleet's workers and carries messages to them and back, and what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from partita.inference.fleet.messages import LogMessage, WorkerJob
from partita.inference.fleet.work_items import WorkItem
from partita.inference.results import BatchResult


@dataclass(frozen=True)
class WorkerReplied:
    """A worker has done what it was asked for."""

    worker: int
    method: str
    value: Any


@dataclass(frozen=True)
class WorkerReported:
    """A worker has results of its errand, or something to say."""

    worker: int
    found: BatchResult | LogMessage


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's errand is over, and all its results were told."""

    worker: int


@dataclass(frozen=True)
class WorkerLost:
    """A worker is gone. Nothing comes from it any more."""

    worker: int
    reason: str


@dataclass(frozen=True)
class WorkerFailed:
    """A worker has raised what is no row's error."""

    worker: int
    error: Exception


Event = WorkerReplied | WorkerReported | WorkerEnded | WorkerLost | WorkerFailed


class WorkerBackend(Protocol):
    """Workers by number. What they come to is told by `events`, of each worker in order; nothing else here waits.

    Each is a `partita.distributed.worker.Worker` in a process of its own.
    """

    def start(self) -> int:
        """A new worker's number; it is asked `where` it is, and replies once it has started."""

    def ask(self, worker: int, method: str, *given: Any, **named: Any) -> None:
        """Call a method of the worker; `WorkerReplied` has what comes of it."""

    def start_job(self, worker: int, errand: WorkerJob) -> None:
        """Let it answer what it is handed."""

    def submit(self, worker: int, number: int, parcels: Sequence[WorkItem]) -> None:
        """Rows of the errand with this number."""

    def end(self, worker: int, number: int, *, now: bool) -> None:
        """No more rows come; with `now`, it leaves what it has not begun."""

    def stop(self, worker: int) -> None:
        """End its process, whatever it does, and forget it."""

    def events(self, timeout_seconds: float) -> list[Event]:
        """What has happened since, at least one event unless that takes too long.

        A worker on an errand is lost behind all results of its that have come.
        """

    def resources(self) -> Mapping[str, float]:
        """What there is to run workers on, in all."""
