"""Progress and log in a notebook: one text that is updated in place, and plain lines below it.

Jupyter, Colab and others can update an output without ipywidgets. Standard error would be shown in red, and each update
of a bar would be a line.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from partita.runs.progress import ELSEWHERE, as_text, fitting

WIDTH = 88
"""Columns of the text."""
UPDATE_EVERY_SECONDS = 0.5
LOGGERS = ("partita", "partita_trainers", "partita_schema")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def show_in_notebook(*, quiet: bool) -> None:
    """In a notebook, show progress and log of this process as text; elsewhere do nothing.

    A log that the user has set up with `logging` stays as it is.
    """
    if not in_notebook():
        return
    if show not in ELSEWHERE:
        ELSEWHERE.append(show)
    if logging.getLogger().handlers:
        return
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(LineHandler())
            logger.propagate = False
        if all(isinstance(handler, LineHandler) for handler in logger.handlers):
            logger.setLevel(logging.WARNING if quiet else logging.INFO)


class LineHandler(logging.Handler):
    """Writes each record as a line of the cell's output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        sys.stdout.write(f"{self.format(record)}\n")


class NotebookBar:
    """A line of the display."""

    def __init__(self, display: "NotebookDisplay", total: int, description: str, *, completed: int) -> None:
        """Start the clock.

        Args:
            display: The display with this line.
            total: Amount of the whole work.
            description: Text at the start of the line.
            completed: Amount done before.
        """
        self.display, self.total, self.description = display, total, description
        self.done = self.first = completed
        self.started = time.monotonic()
        self.fields: tuple[str, ...] = ()

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Count progress, and update the display if it is due."""
        self.done += amount
        self.fields = tuple(map(as_text, shown.items())) or self.fields
        self.display.update()

    def text(self) -> str:
        """Return the line."""
        elapsed = time.monotonic() - self.started
        done, missing = self.done - self.first, self.total - self.done
        line = fitting(
            WIDTH,
            head=self.description,
            count=f"{self.done:,}/{self.total:,}",
            elapsed=elapsed,
            left=elapsed / done * missing if done > 0 and missing > 0 else None,
            fields=self.fields,
        )
        filled = line.bar * self.done // max(1, self.total)
        bar = ("━" * filled).ljust(line.bar, "─")
        return " ".join(part for part in (line.head, bar, line.rest) if part)


class NotebookDisplay:
    """An output of a cell with a line for each open bar: that of the training, and that of an evaluation in it."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self.bars: list[NotebookBar] = []
        self.handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
        self.updated = 0.0

    def update(self, *, now: bool = False) -> None:
        """Show the current lines if the last update was long enough ago, or `now`."""
        if now or time.monotonic() - self.updated >= UPDATE_EVERY_SECONDS:
            self.updated = time.monotonic()
            self.handle.update({"text/plain": self.text()}, raw=True)

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(bar.text() for bar in self.bars)


DISPLAYS: list[NotebookDisplay] = []
"""The display that is open now, if any."""


@contextmanager
def show(total: int, description: str, *, completed: int = 0) -> Iterator[NotebookBar]:
    """Yield a bar in the output of the cell; inside another bar, a line below it that is removed at its end.

    Args:
        total: Number of items.
        description: What is counted.
        completed: Items done before.
    """
    outer = not DISPLAYS
    if outer:
        DISPLAYS.append(NotebookDisplay())
    (display,) = DISPLAYS
    bar = NotebookBar(display, total, description, completed=completed)
    display.bars.append(bar)
    if outer:
        display.handle.display({"text/plain": display.text()}, raw=True)
    try:
        yield bar
    finally:
        if outer:
            DISPLAYS.clear()
        else:
            display.bars.remove(bar)
        display.update(now=True)
