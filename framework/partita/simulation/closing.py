"""Environments that close what they hold: beside the dialogues, of which that is no part any more."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Closing:
    """Closes things, each in a thread of its own: one that raises or hangs changes nothing of what was said."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.changing = threading.RLock()  # worlds that are forgotten close where garbage is collected: anywhere

    def begin(self, close: Callable[[], None]) -> None:
        """Begin to close something."""

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
        """Wait until all is closed, for so many seconds at most; what is not closed then is left behind."""
        end = time.monotonic() + seconds
        with self.changing:
            threads = self.threads
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = sum(thread.is_alive() for thread in threads)
        if late:
            told = "1 environment has" if late == 1 else f"{late} environments have"
            logger.warning("%s not closed within %g s (limits.step_seconds)", told, seconds)
