"""Progress: a bar on a terminal, a plain line now and then elsewhere, nothing when it is quiet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

LINE_EVERY_SECONDS = 10.0
WIDE_BAR, NARROW_BAR = 16, 8
"""Columns of the bar."""

LABELS = {"tokens_per_second": "tokens/s", "prompt_tokens_per_second": "prompt tokens/s", "turns_per_second": "turns/s"}


class NoProgress:
    """Shows nothing."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on."""


class PlainProgress:
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


class ProgressBar:
    """A bar of rich's with the time left and what else is shown."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on."""
        fields = tuple(map(as_text, shown.items()))
        self.bar.update(self.task, advance=amount, **({"shown": fields} if shown else {}))


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
        yield NoProgress()
    elif ELSEWHERE:
        with ELSEWHERE[-1](total, description, completed=completed) as display:
            yield display
    elif stream.isatty():
        with rich_bar(stream) as bar:
            yield ProgressBar(bar, bar.add_task(description, total=total, completed=completed, shown=()))
    else:
        lines = PlainProgress(total, description, completed=completed, stream=stream)
        try:
            yield lines
        finally:
            lines.print_line()


def rich_bar(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    console = Console(file=stream)

    class Line(ProgressColumn):
        """A whole line of the display, as wide as the terminal at most."""

        def render(self, task: Task) -> Table:
            line = fitting(
                console.width,
                head=f"{task.description}",
                count=f"{int(task.completed):,}/{int(task.total or 0):,}",
                elapsed=task.finished_time if task.finished else task.elapsed,
                left=None if task.finished else task.time_remaining,
                fields=task.fields["shown"],
            )
            table = Table.grid(padding=(0, 1, 0, 0))
            bar = ProgressBar(total=task.total, completed=task.completed, width=line.bar)
            table.add_row(line.head, *([bar] if line.bar else []), line.rest)
            return table

    return Progress(Line(), console=console)


@dataclass(frozen=True)
class FittingLine:
    """A line of progress: text, a bar of `bar` columns, and text, with a space between them."""

    head: str
    bar: int
    rest: str

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return len(self.head) + 1 + (self.bar + 1 if self.bar else 0) + len(self.rest)


def fitting(
    width: int, *, head: str, count: str, elapsed: float | None, left: float | None, fields: Sequence[str]
) -> FittingLine:
    """Return the fullest line that fits a width.

    Fields go first, from the last one on; then the bar gets shorter, the elapsed time goes, the first field, the bar,
    and the time left. What is counted always stays.

    Args:
        width: columns of the terminal.
        head: what is done.
        count: how much of it is done.
        elapsed: seconds since the start, or None.
        left: seconds to the end, or None where that is not known.
        fields: other values, the most important first.
    """
    remaining = f"{clock(left)} left" if left is not None else ""
    spent = f"{clock(elapsed)} elapsed" if elapsed is not None else ""
    both = ", ".join(time for time in (spent, remaining) if time)
    first = min(1, len(fields))
    layouts = [(WIDE_BAR, both, number) for number in range(len(fields), first - 1, -1)]
    layouts += [(NARROW_BAR, both, first), (NARROW_BAR, remaining, first), (NARROW_BAR, remaining, 0)]
    layouts += [(0, remaining, 0), (0, "", 0)]
    lines = (
        FittingLine(head, bar, "  ".join(text for text in (count, times, *fields[:number]) if text))
        for bar, times, number in layouts
    )
    return next((line for line in lines if line.width <= width), FittingLine(head, 0, count))


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
