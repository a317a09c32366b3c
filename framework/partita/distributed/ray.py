"""Workers of a fleet as Ray's actors, and ranks of a training as Ray Train's. Nothing else here imports Ray.

Ray starts and ends processes, finds machines for them and carries messages. Of a fleet it restarts nothing: a worker
that is gone is told of as such, and who dealt its rows knows which of them were answered. Of a training it starts all
ranks again when one is gone; they go on at the newest checkpoint by themselves.
"""

import itertools
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from partita.distributed.event_queue import EventQueue, JobFinished, Message, Posted
from partita.distributed.init import available_cores
from partita.distributed.rank import run_rank
from partita.inference.fleet.messages import WorkerJob
from partita.inference.fleet.work_items import WorkItem
from partita.inference.fleet.worker_backend import (
    Event,
    WorkerEnded,
    WorkerFailed,
    WorkerLost,
    WorkerReplied,
    WorkerReported,
)
from partita_schema.backend import RayBackend
from partita_schema.errors import ConfigError, DataError, JobError, PartitaError, Problem, TrainingError

POST = "post"
"""The thread of a worker that takes what is handed to it while another one answers."""
POSTED = ("hand", "end")
"""Methods that run there."""
STORE_BYTES = 256 * 2**20
"""Memory that a Ray of our own may keep objects in: nothing large travels."""
SEAT = "partita"
"""A resource of a Ray of our own, of which each rank takes one: nothing else has to be counted there."""
AGENTS = 1_000_000
LEAVE_SECONDS = 5.0
"""Time that ranks have to end by themselves before Ray ends them, once one of them has failed."""
END_SECONDS = 20.0
"""Time that Ray has to end what belongs to a training."""
KNOCK_SECONDS = 20
"""Time that the machine of an address has to answer."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # What Ray will do one day, and warns of until then: devices that nobody asked for are left as they are.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Of an error that ends a job, what other workers say of it is not looked at.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Ray prints a long text on standard output, where results go; the fleet says it in its own words.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
    # How soon a rank that is gone is noticed.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Relative paths begin where the command was started.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Variables that Ray reads when it is imported, unless somebody has set them."""


class RayWorkerBackend:
    """A `partita.inference.fleet.worker_backend.WorkerBackend` of actors. They end with this object, or with the
    process."""

    def __init__(self, backend: RayBackend, *, device: str) -> None:
        """Connects to Ray, or starts one. `device` is the one that the file asks for.

        Raises ConfigError where Ray is not installed, and JobError where it does not answer.
        """
        from partita.distributed.worker import Worker

        self.ray = connect(backend)
        # A Ray of our own has nothing else to count processors for.
        self.cpus = 0 if is_own(self.ray) else 1
        self.kind = self.ray.remote(concurrency_groups={POST: 1})(Worker)
        self.workers, self.gpus = places(self.ray, backend, device=device)
        self.numbers = itertools.count()
        self.actors: dict[int, Any] = {}
        self.waiting: list[tuple[Any, int, str]] = []
        """What will come, of which worker, from which method."""

    def start(self) -> int:
        """A new actor, on a GPU of its own where there are any."""
        number = next(self.numbers)
        self.actors[number] = self.kind.options(
            num_cpus=self.cpus, num_gpus=1 if self.gpus else 0, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote()
        self.ask(number, "where")
        return number

    def ask(self, worker: int, method: str, *given: Any, **named: Any) -> None:
        """Call a method of the actor."""
        self.waiting.append((getattr(self.actors[worker], method).remote(*given, **named), worker, method))

    def start_job(self, worker: int, errand: WorkerJob) -> None:
        """Begin the stream of its results."""
        stream = self.actors[worker].answer.options(num_returns="streaming").remote(errand)
        self.waiting.append((stream, worker, "answer"))

    def submit(self, worker: int, number: int, parcels: Sequence[WorkItem]) -> None:
        """Rows, to the thread that takes them."""
        self.post(worker, "hand", number, list(parcels))

    def end(self, worker: int, number: int, *, now: bool) -> None:
        """The end, behind all rows."""
        self.post(worker, "end", number, now=now)

    def post(self, worker: int, method: str, *given: Any, **named: Any) -> None:
        """Call a method while the actor answers."""
        call = getattr(self.actors[worker], method).options(concurrency_group=POST)
        self.waiting.append((call.remote(*given, **named), worker, method))

    def stop(self, worker: int) -> None:
        """Kill the actor."""
        self.waiting = [entry for entry in self.waiting if entry[1] != worker]
        self.ray.kill(self.actors.pop(worker))

    def events(self, timeout_seconds: float) -> list[Event]:
        """What has come."""
        coming = [entry[0] for entry in self.waiting]
        self.ray.wait(coming, timeout=timeout_seconds)
        ready, _ = self.ray.wait(coming, num_returns=len(coming), timeout=0)
        places = {id(entry[0]): entry for entry in self.waiting}
        return [event for found in ready for event in self.taken(places[id(found)])]

    def taken(self, entry: tuple[Any, int, str]) -> Iterator[Event]:
        """What one of those that were waited for has brought."""
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
        except errors.RayError as error:  # the process, its machine, or what it had sent is gone
            # That its results have ended says it as well, and behind those that have come.
            event = WorkerLost(worker, " ".join(str(error).split())) if method not in POSTED else None
        self.waiting.remove(entry)
        if event is not None:
            yield event

    def resources(self) -> Mapping[str, float]:
        """Processors and GPUs of all machines."""
        return resources(self.ray)


class RayRankLauncher:
    """`partita.distributed.rank_monitor.RankLauncher` that Ray Train's TorchTrainer starts; they end with the
    process."""

    def __init__(
        self, backend: RayBackend, work: Callable[[], Any], *, device: str, threads: str, quiet: bool, storage: Path
    ) -> None:
        """Each rank does the `work`. Ray may write into the folder `storage`.

        `device`, `threads` and `quiet` are those of the command. Raises ConfigError where Ray is not installed,
        JobError where it does not answer, and DataError where the work cannot be sent.
        """
        self.ray = connect(backend)
        warnings.filterwarnings("ignore", module=r"ray\.")  # what Ray says of its own parts is for its makers
        train, torch_trainer = train_library()
        self.workers, gpus = places(self.ray, backend, device=device)
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self.ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = self.ray.remote(num_cpus=0, scheduling_strategy=here)(EventQueue).remote()
        self.known: dict[str, Any] = {}
        try:
            sent = self.ray.put(work)
        except Exception as error:  # pickle's own, or whatever an object of the user's raises
            message = f"the data set cannot be sent to workers ({error}); write it to a file, and name that"
            raise DataError(message) from error
        board = self.board

        def rank() -> None:
            """The function of every worker."""
            work_as_rank(sent, board, threads=threads, quiet=quiet)

        each = {SEAT: 1.0} if is_own(self.ray) else {"CPU": 1.0}
        self.trainer = torch_trainer.TorchTrainer(
            rank,
            torch_config=torch_trainer.TorchConfig(
                backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=int(backend.timeout_seconds)
            ),
            scaling_config=train.ScalingConfig(
                num_workers=self.workers,
                use_gpu=bool(gpus),
                resources_per_worker={**each, "GPU": 1.0} if gpus else each,
            ),
            run_config=train.RunConfig(
                name="partita",
                storage_path=str(storage),
                failure_config=train.FailureConfig(max_failures=backend.max_failures),
                callbacks=[judge(train, board)],
            ),
        )
        self.thread = threading.Thread(target=self.fit, name="partita-ray-train", daemon=True)
        self.thread.start()

    def fit(self) -> None:
        """Train, and tell that it is over; in a thread of its own."""
        over = JobFinished()
        try:
            self.trainer.fit()
        except Exception as error:  # of Ray's own; what a rank raised was told by the rank
            over = JobFinished(" ".join(str(error).split()), type(error).__name__ == "WorkerGroupError")
        with suppress(Exception):  # where the process ends, Ray may be gone before
            self.ray.get(self.board.tell.remote("", over))

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """What has been told. Raises JobError where Ray does not answer any more."""
        self.thread.join(timeout_seconds)
        try:
            told, self.known = self.ray.get(self.board.fetch.remote())
        except self.ray.exceptions.RayError as error:
            message = f"Ray is gone ({error}); what was saved is kept, start the same command again to go on"
            raise TrainingError(message) from error
        return list(told)

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self.ray.get(self.board.stop.remote())

    def end(self, sender: str) -> None:
        """Kill the actor of a rank."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.known[sender])

    def close(self) -> None:
        """Kill what is left of the ranks, and wait for Ray."""
        if self.thread.is_alive():
            with suppress(self.ray.exceptions.RayError, TrainingError):
                self.stop()
                self.poll(0)
            for sender in [sender for sender, rank in self.known.items() if rank is not None]:
                self.end(sender)
            self.thread.join(END_SECONDS)

    def resources(self) -> Mapping[str, float]:
        """Processors and GPUs of all machines."""
        return resources(self.ray)


def work_as_rank(sent: Any, board: Any, *, threads: str, quiet: bool) -> None:
    """Do what was sent, as one of Ray Train's workers."""
    import ray

    context = ray.get_runtime_context()
    sender, actor = context.get_actor_id(), context.current_actor

    def tell(message: Message) -> None:
        ray.get(board.tell.remote(sender, message, actor))

    def is_stopping() -> bool:
        return bool(ray.get(board.is_stopping.remote()))

    run_rank(lambda: ray.get(sent)(), tell=tell, is_stopping=is_stopping, threads=threads, quiet=quiet)


def judge(train: Any, board: Any) -> Any:
    """What Ray asks when a worker has ended before its time: it raises where no start helps, and Ray makes none."""

    class Judge(train.UserCallback):  # type: ignore[misc]  # Ray's classes are known once it is imported
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            import ray

            if ray.get(board.lose.remote(list(worker_exceptions))):
                end = time.monotonic() + LEAVE_SECONDS
                while ray.get(board.is_at_work.remote()) and time.monotonic() < end:
                    time.sleep(0.1)  # the others are about to notice, and note how the run has ended
                raise JobError("the training is over")

    return Judge()


def train_library() -> tuple[Any, Any]:
    """ray.train and ray.train.torch. Raises ConfigError where this Ray has none that can be used."""
    try:
        import ray.train
        import ray.train.torch

        _ = ray.train.UserCallback
    except (ImportError, AttributeError) as error:
        message = f"this Ray cannot train ({error}); run `pip install 'partita[ray]'`"
        raise ConfigError([Problem("backend.type", message)]) from None
    return ray.train, ray.train.torch


def places(ray: Any, backend: RayBackend, *, device: str) -> tuple[int, int]:
    """Number of workers, and of the cluster's GPUs that they may use."""
    gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    return (gpus or 1) if backend.workers == "auto" else backend.workers, gpus


def resources(ray: Any) -> dict[str, float]:
    """Processors and GPUs of all machines."""
    total = ray.cluster_resources()
    return {"CPUs": total.get("CPU", 0.0), "GPUs": total.get("GPU", 0.0)}


def is_own(ray: Any) -> bool:
    """Whether this is a Ray that `connect` has started."""
    return SEAT in ray.cluster_resources()


def connect(backend: RayBackend) -> Any:
    """The module of Ray, connected: to what this process is connected to already, else to the address.

    Without an address, to a Ray of its own, which ends with the process.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        message = "Ray is not installed; run `pip install 'partita[ray]'`, or remove backend"
        raise ConfigError([Problem("backend.type", message)]) from None
    if ray.is_initialized():
        return ray
    place = f"at {backend.address} (backend.address)" if backend.address else "on this machine"
    own = {
        "num_cpus": available_cores(),
        "resources": {SEAT: AGENTS},
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }
    with same_signals():
        try:
            if backend.address is not None:
                check_is_there(backend.address)
            ray.init(
                address=backend.address or "local",
                log_to_driver=False,
                logging_level="ERROR",
                **({} if backend.address else own),
            )
        except (OSError, RuntimeError, ValueError) as error:
            advice = "start a cluster with `ray start --head`, or correct it" if backend.address else "see its logs"
            raise JobError(f"Ray cannot be reached {place}: {error}; {advice}") from error
    return ray


def check_is_there(address: str) -> None:
    """Raises OSError where nothing listens at HOST:PORT: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


@contextmanager
def same_signals() -> Iterator[None]:
    """Around what would answer SIGTERM in its own way: this process answers it as before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
