"""Ctrl-C and SIGTERM between steps, not inside one: what was begun is finished, and can be kept."""

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
    """False: nobody asks."""
    return False


LISTENING: "list[Interruption]" = []
"""What hears somebody now."""


def ask_to_stop() -> bool:
    """Ask what listens in this process to stop, as a first Ctrl-C does; False where nothing listens."""
    listening = list(LISTENING)
    for asked in listening:
        if not asked.asked:
            asked.remember()
    return bool(listening)


class Interruption:
    """Whether somebody asked to stop."""

    def __init__(self, told: str) -> None:
        """`told` is what is said of it."""
        self.told = told
        self.asked = False
        self.since = 0.0
        """When, by the monotonic clock."""

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one stops at once."""
        if self.asked:
            raise KeyboardInterrupt
        self.remember()
        logger.info("%s; once more to stop at once", self.told)

    def remember(self) -> None:
        """Somebody asks now."""
        self.asked, self.since = True, time.monotonic()


@contextmanager
def interruption(told: str) -> Iterator[Interruption]:
    """In this context the first Ctrl-C or SIGTERM is only remembered.

    Outside the main thread no signal is heard, nor one that the process was started to ignore, as Ctrl-C is by what a
    script runs in the background. `ask_to_stop` is heard in any thread.
    """
    asked = Interruption(told)
    heard: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, asked.ask) for number in heard}
    LISTENING.append(asked)
    try:
        yield asked
    finally:
        LISTENING.remove(asked)
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end with it: for a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
