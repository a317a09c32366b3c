"""Placement of trials on the machines of a Ray cluster.

Each Ray worker is a `TrialHost`, which runs one trial at a time in a fork, as `LocalWorkers` does on one machine. Ray
chooses the machines, and reports workers that are gone; their trials continue elsewhere.
"""

import itertools
import logging
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.backends.ray.connection import connect, is_own, resources, worker_and_gpu_counts
from partita.runs.sweep_record import read_result
from partita.sweeps.folder_lock import FolderLock, join_lock
from partita.sweeps.trial import TrialOrder
from partita.sweeps.workers import LocalWorkers, TrialEnd
from partita_schema.common.text import counted
from partita_schema.errors import JobError, PartitaError, shortened
from partita_schema.sections.backend import RayBackendConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Longest time that a worker waits for the end of a trial before it answers that there is none yet."""
MAX_DEATHS = 3
"""Workers that may be lost in a row before their first trial, if there is no other worker."""
LONGEST_REASON = 400
"""Characters of the reason why a worker was lost."""


@dataclass(frozen=True)
class HostRequest:
    """What a worker needs before its first trial."""

    folder: Path
    """The folder of the sweep, absolute."""
    token: str
    """The token of its lock."""
    start: Path
    """The folder where the command was started."""
    threads: str
    """OMP_NUM_THREADS of the command; empty if it is not set."""


class TrialHost:
    """A Ray worker: runs trials on its machine, one at a time. It ends with the command, however that ends."""

    def __init__(self) -> None:
        self.workers: LocalWorkers | None = None
        self.order: TrialOrder | None = None

    def open(self, request: HostRequest) -> str:
        """Start the process that loads the libraries, and return the process and the machine of this worker.

        Raises:
            PartitaError: The folder of the sweep is another one on this machine.
        """
        lock = join_lock(request.folder, request.token)
        if request.start.is_dir():
            os.chdir(request.start)
        os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray
        if request.threads:
            os.environ["OMP_NUM_THREADS"] = request.threads
        self.workers = LocalWorkers(count=1, lock=lock)
        return f"process {os.getpid()} on {os.uname().nodename}"

    def run(self, order: TrialOrder) -> TrialEnd | None:
        """Start a trial; see `poll`."""
        assert self.workers is not None
        self.workers.start(order)
        self.order = order
        return self.poll()

    def poll(self) -> TrialEnd | None:
        """Return how the trial ended; None if it still runs after some time."""
        assert self.workers is not None
        assert self.order is not None
        if not self.workers.has_ended(POLL_SECONDS):
            return None
        end = self.workers.wait()
        return TrialEnd(end.number, end.status, result=read_result(self.order.run) if end.status == 0 else None)

    def interrupt(self) -> None:
        """Interrupt the trial, and wait until it has saved its progress."""
        assert self.workers is not None
        self.workers.interrupt()


@dataclass
class Host:
    """A Ray worker, as known to the command."""

    number: int
    actor: Any
    reply: Any
    """Its pending reply; None while it waits for a trial."""
    place: str = ""
    """Its process and machine, once known."""
    order: TrialOrder | None = None
    """The trial that it runs."""
    heard: float = field(default_factory=time.monotonic)
    """Time of its last reply, or of its start."""

    @property
    def name(self) -> str:
        """The worker, for messages."""
        return f"worker {self.number}" + (f" ({self.place})" if self.place else "")


class RayWorkers:
    """Runs trials on workers that Ray places, each with a GPU if there are any."""

    def __init__(self, backend: RayBackendConfig, *, device: str, count: int | None, lock: FolderLock) -> None:
        """Connect to Ray, or start it on this machine. Workers are started when there is a trial for them.

        Args:
            backend: The section `backend`.
            device: The configured device.
            count: Maximum number of trials at a time; None for `backend.workers`.
            lock: The lock of the folder of the sweep, which the workers hold too.

        Raises:
            ConfigError: Ray is not installed.
            JobError: Ray cannot be reached.
        """
        self.backend = backend
        self.ray = connect(backend)
        configured, self.gpus = worker_and_gpu_counts(self.ray, backend, device=device)
        self.count = count or configured
        # A Ray that partita started runs nothing else, so CPUs need not be counted.
        self.cpus = 0 if is_own(self.ray) else 1
        self.kind = self.ray.remote(TrialHost)
        self.request = HostRequest(
            lock.folder.resolve(), lock.token, Path.cwd(), threads=os.environ.get("OMP_NUM_THREADS", "")
        )
        self.numbers = itertools.count()
        self.hosts: list[Host] = []
        self.queue: deque[TrialOrder] = deque()
        """Trials without a worker."""
        self.deaths = 0
        """Workers that were lost in a row before their first trial."""
        logger.info("%s on Ray", counted(self.count, "worker"))

    def start(self, order: TrialOrder) -> None:
        """Start a trial on the next worker that is free."""
        self.queue.append(replace(order, run=order.run.resolve()))

    def wait(self) -> TrialEnd:
        """Wait until a trial has ended, or its worker is lost.

        Raises:
            PartitaError: The folder of the sweep is not shared by all machines.
            JobError: No worker starts.
        """
        while True:
            self.assign()
            pending = {host.reply: host for host in self.hosts if host.reply is not None}
            ready, _ = self.ray.wait(list(pending), timeout=POLL_SECONDS)
            end = self.take_reply(pending[ready[0]]) if ready else self.lose_silent()
            if end is not None:
                return end

    def assign(self) -> None:
        """Give waiting trials to free workers, and start workers for the others."""
        for host in self.hosts:
            if host.reply is None and self.queue:
                host.order = self.queue.popleft()
                host.reply, host.heard = host.actor.run.remote(host.order), time.monotonic()
        opening = sum(not host.place for host in self.hosts)
        for _ in range(min(len(self.queue) - opening, self.count - len(self.hosts))):
            self.start_host()

    def start_host(self) -> None:
        """Start a worker."""
        actor = self.kind.options(
            num_cpus=self.cpus, num_gpus=1 if self.gpus else 0, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote()
        self.hosts.append(Host(next(self.numbers), actor, actor.open.remote(self.request)))

    def take_reply(self, host: Host) -> TrialEnd | None:
        """Take a reply of a worker. Return how its trial ended, if it has."""
        errors = self.ray.exceptions
        try:
            value = self.ray.get(host.reply)
        except errors.RayTaskError as error:
            if isinstance(error.cause, PartitaError) and not isinstance(error.cause, JobError):
                raise error.cause from None
            return self.lose(host, str(error.cause))  # the process that starts its trials was killed
        except errors.RayError as error:
            return self.lose(host, str(error))
        host.heard = time.monotonic()
        if isinstance(value, TrialEnd):
            host.order = None
        elif isinstance(value, str):
            host.place, self.deaths = value, 0
        host.reply = None if host.order is None else host.actor.poll.remote()
        return value if isinstance(value, TrialEnd) else None

    def lose_silent(self) -> TrialEnd | None:
        """Give up a worker that has not replied for too long, and return how its trial ended, if it had one.

        Raises:
            JobError: The only workers are those that have not started.
        """
        limit = self.backend.timeout_seconds
        silent = [host for host in self.hosts if host.reply is not None and time.monotonic() - host.heard > limit]
        host = next((host for host in silent if host.order is not None), None)
        if host is not None:
            return self.lose(host, f"it has not answered for {limit:,.0f} s")
        if silent and not any(host.place for host in self.hosts):
            available = ", ".join(f"{amount:g} {name}" for name, amount in resources(self.ray).items())
            raise JobError(
                f"no worker has started for {limit:,.0f} s (backend.timeout_seconds). In all there are "
                f"{available}: add machines, or write a longer time; rerun the same command to continue"
            )
        return None

    def lose(self, host: Host, reason: str) -> TrialEnd | None:
        """Remove a worker that is lost. Return how its trial ended, if it had one.

        Raises:
            JobError: Workers are lost before they have a trial.
        """
        self.hosts.remove(host)
        self.end(host)
        logger.debug("%s: %s", host.name, reason)
        if host.order is not None:
            return TrialEnd(host.order.number, None, worker=host.name)
        self.deaths += 1
        if self.deaths >= MAX_DEATHS and not any(other.place for other in self.hosts):
            raise JobError(
                f"{self.deaths} workers have died one after the other before their first trial, the last one because: "
                f"{shortened(' '.join(reason.split()), LONGEST_REASON)}; rerun the same command to continue"
            )
        logger.warning("%s is gone; a new one replaces it", host.name)
        return None

    def interrupt(self) -> None:
        """Interrupt all trials, and wait until they have saved their progress."""
        replies = [host.actor.interrupt.remote() for host in self.hosts if host.order is not None]
        if replies:
            self.ray.wait(replies, num_returns=len(replies), timeout=self.backend.timeout_seconds)

    def close(self) -> None:
        """End all processes."""
        for host in self.hosts:
            self.end(host)

    def end(self, host: Host) -> None:
        """Kill a worker; the processes that it started end with it."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(host.actor)
