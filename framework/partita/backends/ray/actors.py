"""Inference workers as Ray actors.

Ray starts and stops processes, places them on machines and transports messages. It does not restart workers: a lost one
is reported, and the pool reassigns the rows it had not answered.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partita.backends.ray.connection import connect, is_own, resources, worker_and_gpu_counts
from partita.backends.ray.messages import (
    Event,
    WorkerEnded,
    WorkerFailed,
    WorkerJob,
    WorkerLost,
    WorkerReplied,
    WorkerReported,
)
from partita.backends.ray.work_items import WorkItem
from partita_schema.errors import PartitaError
from partita_schema.sections.backend import RayBackendConfig

POST = "post"
"""Name of the worker thread that receives rows while another one answers."""
POSTED = ("add_rows", "end")
"""Methods that run in the receiving thread."""


class RayWorkerBackend:
    """A `partita.backends.ray.messages.WorkerBackend` of Ray actors.

    The actors end with this object or with the process.
    """

    def __init__(self, backend: RayBackendConfig, *, device: str) -> None:
        """Connect to Ray or start it. `device` is the configured device.

        Raises ConfigError if Ray is not installed, and JobError if it cannot be reached.
        """
        from partita.backends.ray.worker import Worker

        self.ray = connect(backend)
        # A Ray that partita started runs nothing else, so CPUs need not be counted.
        self.cpus = 0 if is_own(self.ray) else 1
        self.kind = self.ray.remote(concurrency_groups={POST: 1})(Worker)
        self.workers, self.gpus = worker_and_gpu_counts(self.ray, backend, device=device)
        self.numbers = itertools.count()
        self.actors: dict[int, Any] = {}
        self.waiting: list[tuple[Any, int, str]] = []
        """Pending results, each with its worker and method."""

    def start(self) -> int:
        """Start an actor, with a GPU if there are any, and return its number."""
        number = next(self.numbers)
        self.actors[number] = self.kind.options(
            num_cpus=self.cpus, num_gpus=1 if self.gpus else 0, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote()
        self.ask(number, "where")
        return number

    def ask(self, worker: int, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of the actor."""
        self.waiting.append((getattr(self.actors[worker], method).remote(*arguments, **named), worker, method))

    def start_job(self, worker: int, worker_job: WorkerJob) -> None:
        """Start a job and the stream of its results."""
        stream = self.actors[worker].answer.options(num_returns="streaming").remote(worker_job)
        self.waiting.append((stream, worker, "answer"))

    def submit(self, worker: int, number: int, work_items: Sequence[WorkItem]) -> None:
        """Send rows to the worker's receiving thread."""
        self.post(worker, "add_rows", number, list(work_items))

    def end(self, worker: int, number: int, *, now: bool) -> None:
        """End a job after all rows that were sent; with `now`, drop rows that have not started."""
        self.post(worker, "end", number, now=now)

    def post(self, worker: int, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method in the worker's receiving thread, while the actor answers."""
        call = getattr(self.actors[worker], method).options(concurrency_group=POST)
        self.waiting.append((call.remote(*arguments, **named), worker, method))

    def stop(self, worker: int) -> None:
        """Kill the actor."""
        self.waiting = [entry for entry in self.waiting if entry[1] != worker]
        self.ray.kill(self.actors.pop(worker))

    def events(self, timeout_seconds: float) -> list[Event]:
        """Return new events."""
        references = [entry[0] for entry in self.waiting]
        self.ray.wait(references, timeout=timeout_seconds)
        ready, _ = self.ray.wait(references, num_returns=len(references), timeout=0)
        entries = {id(entry[0]): entry for entry in self.waiting}
        return [event for reference in ready for event in self.take_events(entries[id(reference)])]

    def take_events(self, entry: tuple[Any, int, str]) -> Iterator[Event]:
        """Yield the events of one pending result that is ready."""
        coming, worker, method = entry
        errors = self.ray.exceptions
        event: Event | None
        try:
            if method == "answer":
                yield WorkerReported(worker, self.ray.get(next(coming)))
                return
            value = self.ray.get(coming)
            event = WorkerReplied(worker, method, value) if method not in POSTED else None
        except StopIteration:
            event = WorkerEnded(worker)
        except errors.RayTaskError as error:
            cause = error.cause
            event = WorkerFailed(worker, cause if isinstance(cause, PartitaError) else error)
        except errors.RayError as error:  # the process, its machine or its result is gone
            # The end of its result stream reports the loss too, after the results that have arrived.
            event = WorkerLost(worker, " ".join(str(error).split())) if method not in POSTED else None
        self.waiting.remove(entry)
        if event is not None:
            yield event

    def resources(self) -> Mapping[str, float]:
        """Return the CPUs and GPUs of all machines."""
        return resources(self.ray)
