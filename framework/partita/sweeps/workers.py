"""Placement of trials: the protocol, and processes on this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar

from partita.runs.sweep_record import TrialResult
from partita.sweeps.trial import TrialOrder
from partita_schema.errors import JobError, PartitaError

SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from partita.sweeps.trial_server import main
main(sys.argv[1:])
"""
"""Program of the process that starts trials. It uses the module search path of this process."""


@dataclass(frozen=True)
class TrialEnd:
    """How the process of a trial ended."""

    number: int
    """Number of the trial."""
    status: int | None
    """Exit status, negative for a signal; None if its worker is gone."""
    result: TrialResult | None = None
    """The result, as another machine has written it; this one may see the file later. None if it is in the file."""
    worker: str = ""
    """The worker, for messages; empty for a process of this machine."""


class Workers(Protocol):
    """Runs trials, each in a process."""

    @property
    def count(self) -> int:
        """Maximum number of trials at a time."""

    def start(self, order: TrialOrder) -> None:
        """Start a trial."""

    def wait(self) -> TrialEnd:
        """Wait until a trial has ended."""

    def interrupt(self) -> None:
        """Interrupt all trials, and wait until they have saved their progress."""

    def close(self) -> None:
        """End all processes."""


W = TypeVar("W", bound=Workers)


@contextmanager
def closing(workers: W) -> Iterator[W]:
    """End all processes on exit. If the command is interrupted or cannot continue, trials save their progress first."""
    try:
        yield workers
    except (KeyboardInterrupt, PartitaError, OSError):
        workers.interrupt()
        raise
    finally:
        workers.close()


class LocalWorkers:
    """Runs trials in processes on this machine."""

    def __init__(self, *, count: int, lock: int) -> None:
        """Start the process that loads the libraries.

        Args:
            count: Maximum number of trials at a time.
            lock: File descriptor of a lock that all processes hold.
        """
        self.count = count
        ours, theirs = socket.socketpair()
        path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(theirs.fileno()), path],
            pass_fds=[theirs.fileno(), lock],
            start_new_session=True,  # Ctrl-C in a terminal is for this process, which passes it on
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.free = list(range(count))
        self.slots: dict[int, int] = {}
        """Slot of each running trial; it selects the GPU."""

    def start(self, order: TrialOrder) -> None:
        """Start a trial, on another GPU than the others if there are several."""
        slot = self.slots[order.number] = self.free.pop(0)
        devices = gpus()
        device = devices[slot % len(devices)] if len(devices) > 1 else None
        with suppress(OSError):  # `wait` reports the end of the process
            self.connection.send(replace(order, device=device))

    def has_ended(self, timeout_seconds: float) -> bool:
        """Wait until a trial has ended, at most for this time, and return whether one has."""
        return self.connection.poll(timeout_seconds)

    def wait(self) -> TrialEnd:
        """Wait until a trial has ended."""
        try:
            number, status = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            message = f"the process that starts the trials ended {how}; rerun the same command to continue"
            raise JobError(message) from None
        self.free.append(self.slots.pop(number))
        return TrialEnd(number, status)

    def interrupt(self) -> None:
        """Interrupt all trials, and wait until they have saved their progress."""
        try:
            self.connection.send(None)
            while self.connection.recv() is not None:
                continue
        except (EOFError, OSError):
            return

    def close(self) -> None:
        """End all processes."""
        self.connection.close()
        self.process.wait()


def gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that trials may use, as values of CUDA_VISIBLE_DEVICES. CUDA is not initialized.

    CUDA counts the GPUs of a container from 0, whatever the numbers of their device files.

    Args:
        devices: Folder of device files.
    """
    written = os.environ.get("CUDA_VISIBLE_DEVICES")
    if written is not None:
        return [name.strip() for name in written.split(",") if name.strip()]
    names = [path.name for path in devices.iterdir()] if devices.is_dir() else []
    return [str(number) for number in range(sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names))]
