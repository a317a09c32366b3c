"""Graceful interruption: on Ctrl-C or SIGTERM the current step is finished first, so that it can be saved."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType

logger = logging.getLogger(__name__)


def never() -> bool:
    """Return False: no stop was requested."""
    return False


LISTENING: "list[Interruption]" = []
"""Active interruptions."""
TERMINATED = threading.Event()
"""Set by a SIGTERM during an interruption: a scheduler or the launcher of several processes ends this one."""


def ask_to_stop() -> bool:
    """Request a stop, as a first Ctrl-C does. Return False if no interruption is active in this process."""
    listening = list(LISTENING)
    for interrupt in listening:
        if not interrupt.requested:
            interrupt.record()
    return bool(listening)


class Interruption:
    """Whether a stop was requested."""

    def __init__(self, message: str) -> None:
        """Create an interruption that logs `message` when a stop is requested."""
        self.message = message
        self.requested = False
        self.since = 0.0
        """Time of the request, by the monotonic clock."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, raise KeyboardInterrupt on the second."""
        if number == signal.SIGTERM:
            TERMINATED.set()
        if self.requested:
            raise KeyboardInterrupt
        self.record()
        logger.info(self.message if number == signal.SIGTERM else f"{self.message}; interrupt again to stop now")

    def record(self) -> None:
        """Record that a stop was requested now."""
        self.requested, self.since = True, time.monotonic()


@contextmanager
def interruption(message: str) -> Iterator[Interruption]:
    """Record the first Ctrl-C or SIGTERM inside the context instead of raising KeyboardInterrupt.

    Signals are not handled outside the main thread, nor if the process was started to ignore them, as background jobs
    of a script ignore Ctrl-C. `ask_to_stop` works in any thread.
    """
    interrupt = Interruption(message)
    heard: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt.handle) for number in heard}
    LISTENING.append(interrupt)
    try:
        yield interrupt
    finally:
        LISTENING.remove(interrupt)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM that arrive inside the context at its end. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def end_with_parent() -> None:
    """Wait for the parent process to exit, then exit this process. Run it in a separate thread."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
