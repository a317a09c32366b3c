"""The process that starts the trials of a sweep: it loads the libraries once, and forks for each trial.

A fork takes milliseconds and begins with the libraries loaded, and its memory is free when it ends, however it ends. A
trial that runs out of memory ends alone. All processes end with the command that started them, however that ends.
"""

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

from partita.sweeps.trial import TrialOrder, execute
from partita_schema.common.garbage_collection import permanent_imports

PARENT_DEATH_SIGNAL = 1
"""Option of prctl on Linux."""
LIBRARIES = ("torch", "transformers", "accelerate", "partita.backends.open", "partita.training.run")


class TrialServer:
    """Starts trials in forks, and reports how each ended."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.running: dict[Connection, tuple[int, int]] = {}
        """Number and process id of each running trial, by a pipe that closes when it ends."""

    def serve(self) -> None:
        """Take orders until the connection closes, then end all trials."""
        try:
            while True:
                for ready in wait([self.connection, *self.running]):
                    assert isinstance(ready, Connection)
                    if ready is self.connection:
                        self.take_order(ready.recv())
                    else:
                        self.report(ready)
        except (EOFError, OSError):
            self.end_all(signal.SIGKILL)

    def take_order(self, order: TrialOrder | None) -> None:
        """Start a trial; None interrupts all trials, each of which saves its progress."""
        if order is None:
            self.end_all(signal.SIGINT)
            self.connection.send(None)
            return
        if order.config.get("adapter") is not None:
            load_adapter_libraries()
        ours, theirs = Pipe(duplex=False)
        # A trial that is interrupted before it has its handler gets the signal as soon as it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        server, process = os.getpid(), os.fork()
        if process == 0:
            self.connection.close()
            ours.close()
            for other in self.running:
                other.close()
            run_in_fork(order, server=server)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        self.running[ours] = (order.number, process)

    def report(self, ended: Connection) -> None:
        """Report a trial that has ended: its number and exit status, negative for a signal."""
        number, process = self.running.pop(ended)
        ended.close()
        _, status = os.waitpid(process, 0)
        self.connection.send((number, os.waitstatus_to_exitcode(status)))

    def end_all(self, number: signal.Signals) -> None:
        """Send a signal to all trials, and wait until they have ended."""
        for _, process in self.running.values():
            with suppress(ProcessLookupError):
                os.kill(process, number)
        for _, process in self.running.values():
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
        self.running.clear()


def run_in_fork(order: TrialOrder, *, server: int) -> None:
    """Run a trial in a fork, and end the process.

    Args:
        order: The trial.
        server: Process id of the parent; without it nothing is run.
    """
    status = 1
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if os.getppid() != server:  # it was killed before this process could ask to end with it
            return
        status = execute(order)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def load(libraries: Sequence[str]) -> None:
    """Import libraries here, so that no fork needs to.

    Garbage collections in a fork would visit and copy their objects.
    """
    with permanent_imports():
        for library in libraries:
            importlib.import_module(library)


def load_adapter_libraries() -> None:
    """Import what trials with an adapter need."""
    from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

    import_bitsandbytes()
    load(["peft"])


def main(arguments: Sequence[str]) -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    load(LIBRARIES)
    TrialServer(Connection(int(arguments[0]))).serve()
