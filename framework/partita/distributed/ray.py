"""Workers of a fleet as Ray's actors, on this machine or on those of a cluster. Nothing else here imports Ray.

Ray starts and ends processes, finds machines for them and carries messages. It restarts nothing: a worker that is gone
is told of as such, and who dealt its rows knows which of them were answered.
"""

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partita.distributed.joining import available_cores
from partita.inference.fleet.crew import Ended, Event, Failed, Lost, Replied, Told
from partita.inference.fleet.messages import Errand
from partita.inference.fleet.parcels import Parcel
from partita_schema.backend import RayBackend
from partita_schema.errors import ConfigError, PartitaError, Problem

POST = "post"
"""The thread of a worker that takes what is handed to it while another one answers."""
POSTED = ("hand", "end")
"""Methods that run there."""
STORE_BYTES = 256 * 2**20
"""Memory that a Ray of our own may keep objects in: nothing large travels."""
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
}
"""Variables that Ray reads when it is imported, unless somebody has set them."""


class RayCrew:
    """A `partita.inference.fleet.crew.Crew` of actors. They end with this object, or with the process."""

    def __init__(self, backend: RayBackend, *, device: str) -> None:
        """Connects to Ray, or starts one. `device` is the one that the file asks for.

        Raises ConfigError where Ray is not installed, and PartitaError where it does not answer.
        """
        from partita.distributed.worker import Worker

        self.ray, is_own = connect(backend)
        # A Ray of our own has nothing else to count processors for.
        self.cpus = 0 if is_own else 1
        self.kind = self.ray.remote(concurrency_groups={POST: 1})(Worker)
        total = self.ray.cluster_resources()
        self.gpus = 0 if device == "cpu" else int(total.get("GPU", 0))
        self.workers = (self.gpus or 1) if backend.workers == "auto" else backend.workers
        self.numbers = itertools.count()
        self.actors: dict[int, Any] = {}
        self.waiting: list[tuple[Any, int, str]] = []
        """What will come, of which worker, from which method."""

    def hire(self) -> int:
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

    def begin(self, worker: int, errand: Errand) -> None:
        """Begin the stream of its results."""
        stream = self.actors[worker].answer.options(num_returns="streaming").remote(errand)
        self.waiting.append((stream, worker, "answer"))

    def hand(self, worker: int, number: int, parcels: Sequence[Parcel]) -> None:
        """Rows, to the thread that takes them."""
        self.post(worker, "hand", number, list(parcels))

    def end(self, worker: int, number: int, *, now: bool) -> None:
        """The end, behind all rows."""
        self.post(worker, "end", number, now=now)

    def post(self, worker: int, method: str, *given: Any, **named: Any) -> None:
        """Call a method while the actor answers."""
        call = getattr(self.actors[worker], method).options(concurrency_group=POST)
        self.waiting.append((call.remote(*given, **named), worker, method))

    def dismiss(self, worker: int) -> None:
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
                yield Told(worker, self.ray.get(next(coming)))
                return
            value = self.ray.get(coming)
            event = Replied(worker, method, value) if method not in POSTED else None
        except StopIteration:
            event = Ended(worker)
        except errors.RayTaskError as error:
            cause = error.cause
            event = Failed(worker, cause if isinstance(cause, PartitaError) else error)
        except errors.RayError as error:  # the process, its machine, or what it had sent is gone
            # That its results have ended says it as well, and behind those that have come.
            event = Lost(worker, " ".join(str(error).split())) if method not in POSTED else None
        self.waiting.remove(entry)
        if event is not None:
            yield event

    def resources(self) -> Mapping[str, float]:
        """Processors and GPUs of all machines."""
        total = self.ray.cluster_resources()
        return {"CPUs": total.get("CPU", 0.0), "GPUs": total.get("GPU", 0.0)}


def connect(backend: RayBackend) -> tuple[Any, bool]:
    """The module of Ray, connected: to what this process is connected to already, else to the address.

    Without an address, to a Ray of its own, which ends with the process; whether it is that comes second.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        message = "Ray is not installed; run `pip install 'partita[ray]'`, or remove backend"
        raise ConfigError([Problem("backend.type", message)]) from None
    if ray.is_initialized():
        return ray, False
    place = f"at {backend.address} (backend.address)" if backend.address else "on this machine"
    own = {"num_cpus": available_cores(), "object_store_memory": STORE_BYTES, "include_dashboard": False}
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
            raise PartitaError(f"Ray cannot be reached {place}: {error}; {advice}") from error
    return ray, backend.address is None


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
