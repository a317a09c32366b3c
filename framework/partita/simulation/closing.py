"""Close environments in the background, so that closing cannot affect or delay dialogues."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Closing:
    """Runs each close function in a separate thread: one that raises or hangs does not affect any dialogue."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.changing = threading.RLock()  # reentrant: garbage collection may close a world at any point

    def begin(self, close: Callable[[], None]) -> None:
        """Run `close` in a new thread."""

        def quietly() -> None:
            try:
                close()
            except Exception as error:
                logger.debug("an environment has raised at its end: %s: %s", type(error).__name__, error)

        thread = threading.Thread(target=quietly, name="partita-closing", daemon=True)
        with self.changing:
            thread.start()
            self.threads = [*(other for other in self.threads if other.is_alive()), thread]

    def end(self, seconds: float) -> None:
        """Wait at most `seconds` for all threads, and warn about those that are still running."""
        end = time.monotonic() + seconds
        with self.changing:
            threads = self.threads
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = sum(thread.is_alive() for thread in threads)
        if late:
            subject = "1 environment has" if late == 1 else f"{late} environments have"
            logger.warning("%s not closed within %g s (limits.step_seconds)", subject, seconds)
