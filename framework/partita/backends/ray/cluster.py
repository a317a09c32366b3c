"""Ray: inference workers as actors, and training ranks with Ray Train.

Ray starts and stops processes, places them on machines and transports messages. It does not restart inference workers:
a lost worker is reported, and the pool reassigns the rows it had not answered. If a training rank is lost, Ray restarts
all ranks, which resume at the newest checkpoint by themselves.
"""

import itertools
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita.backends.ray.connection import (
    RANK_RESOURCE,
    connect,
    imported_ray,
    is_own,
    resources,
    train_library,
    worker_and_gpu_counts,
)
from partita.backends.ray.event_queue import EventQueue, JobFinished, Message, Posted
from partita.backends.ray.messages import (
    Event,
    WorkerEnded,
    WorkerFailed,
    WorkerJob,
    WorkerLost,
    WorkerReplied,
    WorkerReported,
)
from partita.backends.ray.rank import run_rank
from partita.backends.ray.work_items import WorkItem
from partita_schema.errors import DataError, JobError, PartitaError, TrainingError
from partita_schema.sections.backend import RayBackendConfig

POST = "post"
"""Name of the worker thread that receives rows while another one answers."""
POSTED = ("hand", "end")
"""Methods that run in the receiving thread."""
LEAVE_SECONDS = 5.0
"""Seconds that ranks have to exit by themselves after one failed, before Ray stops them."""
END_SECONDS = 20.0
"""Seconds that Ray has to stop everything that belongs to a training."""


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
        self.post(worker, "hand", number, list(work_items))

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


class RayRankLauncher:
    """A `partita.backends.ray.rank_monitor.RankLauncher` on Ray Train's TorchTrainer.

    The ranks end with the process.
    """

    def __init__(
        self,
        backend: RayBackendConfig,
        work: Callable[[], Any],
        *,
        device: str,
        threads: str,
        quiet: bool,
        storage: Path,
    ) -> None:
        """Start the ranks.

        Args:
            backend: Backend section of the configuration.
            work: Runs on each rank; must be picklable.
            device: The configured device.
            threads: OMP_NUM_THREADS of the command, "" if unset.
            quiet: Whether ranks report less log output.
            storage: Folder that Ray may write to.

        Raises:
            ConfigError: Ray is not installed.
            JobError: Ray cannot be reached.
            DataError: The work cannot be pickled.
        """
        self.ray = connect(backend)
        warnings.filterwarnings("ignore", module=r"ray\.")  # Ray's warnings about itself do not concern users
        train, torch_trainer = train_library()
        self.workers, gpus = worker_and_gpu_counts(self.ray, backend, device=device)
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self.ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = self.ray.remote(num_cpus=0, scheduling_strategy=here)(EventQueue).remote()
        self.known: dict[str, Any] = {}
        try:
            sent = self.ray.put(work)
        except Exception as error:  # PicklingError, or any error of a user's object
            message = f"the dataset cannot be sent to workers ({error}); write it to a file, and name that"
            raise DataError(message) from error
        board = self.board

        def rank() -> None:
            """Run on every worker."""
            work_as_rank(sent, board, threads=threads, quiet=quiet)

        self.trainer = torch_trainer.TorchTrainer(
            rank,
            torch_config=torch_trainer.TorchConfig(
                backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=math.ceil(backend.timeout_seconds)
            ),
            scaling_config=scaling_config(self.ray, train, workers=self.workers, gpus=gpus),
            run_config=train.RunConfig(
                name="partita",
                storage_path=str(storage),
                failure_config=train.FailureConfig(max_failures=backend.max_failures),
                callbacks=[restart_callback(train, board)],
            ),
        )
        self.thread = threading.Thread(target=self.fit, name="partita-ray-train", daemon=True)
        self.thread.start()

    def fit(self) -> None:
        """Run the TorchTrainer and report its end; runs in a separate thread."""
        over = JobFinished()
        try:
            self.trainer.fit()
        except Exception as error:  # Ray's own errors; a rank reports its error itself
            over = JobFinished(" ".join(str(error).split()), type(error).__name__ == "WorkerGroupError")
        with suppress(Exception):  # Ray may already be gone when the process ends
            self.ray.get(self.board.post.remote("", over))

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """Return new messages. Raises TrainingError if Ray is gone."""
        self.thread.join(timeout_seconds)
        try:
            messages, self.known = self.ray.get(self.board.fetch.remote())
        except self.ray.exceptions.RayError as error:
            message = f"Ray is gone ({error}); saved checkpoints are kept, rerun the same command to resume"
            raise TrainingError(message) from error
        return list(messages)

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self.ray.get(self.board.stop.remote())

    def end(self, sender: str) -> None:
        """Kill the actor of a rank."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.known[sender])

    def close(self) -> None:
        """Kill the remaining ranks and wait for Ray."""
        if self.thread.is_alive():
            with suppress(self.ray.exceptions.RayError, TrainingError):
                self.stop()
                self.poll(0)
            for sender in [sender for sender, rank in self.known.items() if rank is not None]:
                self.end(sender)
            self.thread.join(END_SECONDS)

    def resources(self) -> Mapping[str, float]:
        """Return the CPUs and GPUs of all machines."""
        return resources(self.ray)


def work_as_rank(sent: Any, board: Any, *, threads: str, quiet: bool) -> None:
    """Run the work as one of Ray Train's workers.

    Args:
        sent: Reference to the pickled work.
        board: Actor of the event queue.
        threads: OMP_NUM_THREADS of the command, "" if unset.
        quiet: Whether to report less log output.
    """
    ray = imported_ray()
    context = ray.get_runtime_context()
    sender, actor = context.get_actor_id(), context.current_actor

    def send(message: Message) -> None:
        ray.get(board.post.remote(sender, message, actor))

    def is_stopping() -> bool:
        return bool(ray.get(board.is_stopping.remote()))

    run_rank(lambda: ray.get(sent)(), send=send, is_stopping=is_stopping, threads=threads, quiet=quiet)


def restart_callback(train: Any, board: Any) -> Any:
    """Return a Ray Train callback that raises after a worker failed if a restart would not help."""

    class RestartCallback(train.UserCallback):  # type: ignore[misc]  # Ray's classes are known once it is imported
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            ray = imported_ray()
            if ray.get(board.record_deaths.remote(list(worker_exceptions))):
                end = time.monotonic() + LEAVE_SECONDS
                while ray.get(board.is_at_work.remote()) and time.monotonic() < end:
                    time.sleep(0.1)  # the other ranks need time to notice and report their end
                raise JobError("the training is over")

    return RestartCallback()


def scaling_config(ray: Any, train: Any, *, workers: int, gpus: int) -> Any:
    """Return Ray Train's ScalingConfig.

    Args:
        ray: The Ray module.
        train: The module `ray.train`.
        workers: Number of ranks.
        gpus: Number of the cluster's GPUs that they may use.
    """
    # On a Ray that this process started, ranks are limited by a resource of ours: they may be more than its CPUs.
    each = {RANK_RESOURCE: 1.0} if is_own(ray) else {"CPU": 1.0}
    per_worker = {**each, "GPU": 1.0} if gpus else each
    return train.ScalingConfig(num_workers=workers, use_gpu=bool(gpus), resources_per_worker=per_worker)
