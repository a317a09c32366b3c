"""Stopping a job: Ctrl-C, and SIGTERM from a scheduler that reclaims the machine."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from partita_trainers.interrupt import interruption, never

FINISH_SECONDS = 20
"""Time for started rows to finish: schedulers usually kill a job 30 s after asking it to stop."""


@contextmanager
def finish_what_was_begun(engine: str, *, finish_seconds: float = FINISH_SECONDS) -> Iterator[Callable[[], bool]]:
    """Let started rows finish after Ctrl-C or SIGTERM; yield a function that returns whether one was received.

    KeyboardInterrupt is raised by a second signal, by the yielded function after `finish_seconds`, and at once with
    a server, whose answers may take long.
    """
    if engine == "server":
        yield never
        return
    with interruption(f"finishing the rows in progress, for {finish_seconds:g} s at most") as asked:

        def stopping() -> bool:
            if asked.asked and time.monotonic() - asked.since > finish_seconds:
                raise KeyboardInterrupt
            return asked.asked

        yield stopping


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM in this context, as on Ctrl-C. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
