"""Acting on a condition while a job is running."""

import threading
import time
from collections.abc import Callable


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Start a thread that acts as soon as a condition is true."""

    def wait() -> None:
        end = time.monotonic() + 100
        while not condition() and time.monotonic() < end:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
