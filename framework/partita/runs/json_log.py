"""The log as JSON lines on standard error, for collectors of logs: `--log-json`.

Each line is an object with `time`, `level`, `event` and `message`; other keys depend on the event.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from partita.runs.files import strict_json
from partita.runs.progress import ELSEWHERE, LINE_EVERY_SECONDS


class JsonHandler(logging.Handler):
    """Writes a log record as a JSON line. A record with `extra={"fields": {...}}` has these keys too."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            fields: Mapping[str, Any] = getattr(record, "fields", {"event": "log"})
            write_event(record.levelname.lower(), message=record.getMessage(), **fields)
        except Exception:
            self.handleError(record)


def write_event(level: str, *, event: str, message: str, **fields: Any) -> None:
    """Write a JSON line to standard error.

    Args:
        level: info, warning or error.
        event: Kind of the line.
        message: The same in words.
        fields: Other keys.
    """
    now = datetime.fromtimestamp(time.time(), tz=UTC).isoformat(timespec="milliseconds")
    record = {"time": now, "level": level, "event": event, "message": message, **fields}
    sys.stderr.write(strict_json(record) + "\n")
    sys.stderr.flush()


class JsonProgress:
    """Writes an event every ten seconds and one at the end."""

    def __init__(self, total: int, description: str, *, completed: int) -> None:
        """Start the clock.

        Args:
            total: Amount of the whole work.
            description: What is counted.
            completed: Amount done before.
        """
        self.total, self.description, self.done = total, description, completed
        self.started = self.last = time.monotonic()
        self.shown: Mapping[str, Any] = {}

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Count progress, and write an event if it is due."""
        self.done += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.last >= LINE_EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """Write an event."""
        self.last = time.monotonic()
        write_event(
            "info",
            event="progress",
            message=f"{self.description} {self.done:,}/{self.total:,}",
            task=self.description,
            done=self.done,
            total=self.total,
            elapsed_seconds=round(self.last - self.started, 3),
            values=dict(self.shown),
        )


@contextmanager
def show_json(total: int, description: str, *, completed: int = 0) -> Iterator[JsonProgress]:
    """Yield a progress display that writes events.

    Args:
        total: Number of items.
        description: What is counted.
        completed: Items done before.
    """
    display = JsonProgress(total, description, completed=completed)
    try:
        yield display
    finally:
        display.write()


def log_as_json() -> None:
    """Write progress, log and errors of this process as JSON from now on."""
    if show_json not in ELSEWHERE:
        ELSEWHERE.append(show_json)


def is_json() -> bool:
    """Return whether this process writes JSON lines."""
    return show_json in ELSEWHERE
