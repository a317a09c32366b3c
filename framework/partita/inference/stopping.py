"""Jobs that are asked to stop: Ctrl-C, and SIGTERM from systems that want their machine back."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from partita_trainers.interrupt import interruption, never

FINISH_SECONDS = 20
"""How long rows that were begun may take to end: systems that stop a job kill it after 30 s, as a rule."""


@contextmanager
def finish_what_was_begun(engine: str, *, finish_seconds: float = FINISH_SECONDS) -> Iterator[Callable[[], bool]]:
    """In this context Ctrl-C and SIGTERM let rows end that were begun; what comes tells whether one was heard.

    KeyboardInterrupt is raised by a second one, by what comes once that has taken too long, and at once where a server
    answers: it may be long in coming.
    """
    if engine == "server":
        yield never
        return
    with interruption(f"finishing the rows that were begun, for {finish_seconds:g} s at most") as asked:

        def stopping() -> bool:
            if asked.asked and time.monotonic() - asked.since > finish_seconds:
                raise KeyboardInterrupt
            return asked.asked

        yield stopping


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """In this context SIGTERM raises KeyboardInterrupt, as Ctrl-C does; only the main thread can have that."""
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
