"""Progress: a bar on a terminal, a plain line now and then elsewhere, nothing when it is quiet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

LINE_EVERY_SECONDS = 10.0

LABELS = {"tokens_per_second": "tokens/s", "prompt_tokens_per_second": "prompt tokens/s", "turns_per_second": "turns/s"}


class Quiet:
    """Shows nothing."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on."""


class Lines:
    """Prints a line every ten seconds, and one at the end."""

    def __init__(self, total: int, description: str, *, completed: int, stream: TextIO) -> None:
        self.total, self.description, self.stream = total, description, stream
        self.done = self.first = completed
        self.started = self.last = time.monotonic()
        self.shown: Mapping[str, Any] = {}

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on, and print when it is time."""
        self.done += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.last >= LINE_EVERY_SECONDS:
            self.print_line()

    def print_line(self) -> None:
        self.last = time.monotonic()
        parts = [f"{self.description} {self.done:,}/{self.total:,}", *map(as_text, self.shown.items())]
        done = self.done - self.first
        if done > 0 and self.done < self.total:
            left = (self.last - self.started) / done * (self.total - self.done)
            parts.append(f"{clock(left)} left")
        print("  ".join(parts), file=self.stream, flush=True)


class Bar:
    """A bar of rich's with the time left and what else is shown."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on."""
        text = "  ".join(map(as_text, shown.items()))
        self.bar.update(self.task, advance=amount, **({"shown": text} if shown else {}))


ELSEWHERE: list[Callable[..., AbstractContextManager[Any]]] = []
"""What shows the progress of this process, the last of them; none, where it shows it itself."""


@contextmanager
def shown_by(show: Callable[..., AbstractContextManager[Any]]) -> Iterator[None]:
    """In this context `show(total, description, completed=0)` shows all progress."""
    ELSEWHERE.append(show)
    try:
        yield
    finally:
        ELSEWHERE.remove(show)


@contextmanager
def show_progress(
    total: int, description: str, *, completed: int = 0, quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Any]:
    """A progress display on standard error, so that output can be piped."""
    stream = stream or sys.stderr
    if quiet:
        yield Quiet()
    elif ELSEWHERE:
        with ELSEWHERE[-1](total, description, completed=completed) as display:
            yield display
    elif stream.isatty():
        with rich_bar(stream) as bar:
            yield Bar(bar, bar.add_task(description, total=total, completed=completed, shown=""))
    else:
        lines = Lines(total, description, completed=completed, stream=stream)
        try:
            yield lines
        finally:
            lines.print_line()


def rich_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=16),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    # On a narrow terminal what else is shown is cut, not how far the work is.
    shown = TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    return Progress(*columns, shown, console=Console(file=stream), expand=True)


def as_text(item: tuple[str, Any]) -> str:
    name, value = item
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{LABELS.get(name, name)} {value}"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
