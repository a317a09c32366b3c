"""Placement of trials: local processes."""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Protocol

from partita.sweeps.trial import TrialOrder
from partita_schema.errors import JobError


class Workers(Protocol):
    """Runs trials, each in a process."""

    def start(self, order: TrialOrder) -> None:
        """Start a trial."""

    def wait(self) -> tuple[int, int]:
        """Wait until a trial has ended. Return its number and exit status, negative for a signal."""

    def interrupt(self) -> None:
        """Interrupt all trials, and wait until they have saved their progress."""

    def close(self) -> None:
        """End all processes."""


class LocalWorkers:
    """Runs trials in processes on this machine."""

    def __init__(self, *, count: int, lock: int) -> None:
        """Start the process that loads the libraries.

        Args:
            count: Maximum number of trials at a time.
            lock: File descriptor of a lock that all processes hold.
        """
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "partita.sweeps.trial_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), lock],
            start_new_session=True,  # Ctrl-C in a terminal is for this process, which passes it on
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.free = list(range(count))
        self.slots: dict[int, int] = {}
        """Slot of each running trial; it selects the GPU."""

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.interrupt()
        self.close()

    def start(self, order: TrialOrder) -> None:
        """Start a trial, on a GPU of its own if there are several."""
        slot = self.slots[order.number] = self.free.pop(0)
        devices = gpus()
        device = devices[slot % len(devices)] if len(devices) > 1 else None
        self.connection.send(replace(order, device=device))

    def wait(self) -> tuple[int, int]:
        """Wait until a trial has ended. Return its number and exit status, negative for a signal."""
        try:
            number, status = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            message = f"the process that starts the trials ended {how}; rerun the same command to continue"
            raise JobError(message) from None
        self.free.append(self.slots.pop(number))
        return number, status

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
