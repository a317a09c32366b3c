"""Ctrl-C and SIGTERM between steps, not inside one: weights that are half changed cannot be saved."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class Interruption:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one stops at once."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        logger.info("stopping after this step; once more to stop at once")


@contextmanager
def interruption() -> Iterator[Interruption]:
    """In this context the first Ctrl-C or SIGTERM is only remembered. Outside the main thread nothing changes."""
    asked = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
