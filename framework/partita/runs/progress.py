"""Progress displays: a bar on a terminal, periodic lines elsewhere, nothing if quiet."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from partita.runs.waiting import WAITS

if TYPE_CHECKING:
    from partita_trainers.base import Progress

LINE_EVERY_SECONDS = 10.0
WIDE_BAR, NARROW_BAR = 16, 8
"""Width of the bar in columns."""

LABELS = {"tokens_per_second": "tokens/s", "prompt_tokens_per_second": "prompt tokens/s", "turns_per_second": "turns/s"}


READING_IS_SHOWN = 10_000
"""Number of rows above which tokenizing them shows progress."""


class ShowProgress(Protocol):
    """Creates a progress display, such as a run's `progress`."""

    def __call__(self, total: int, description: str, *, completed: int = 0) -> "AbstractContextManager[Progress]":
        """Return the display as a context manager."""


class NoProgress:
    """A display that shows nothing."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Ignore progress."""


class PlainProgress:
    """A display that prints a line every ten seconds and one at the end."""

    def __init__(self, total: int, description: str, *, completed: int, stream: TextIO) -> None:
        """Start the clock.

        Args:
            total: Amount of the whole work.
            description: Text at the start of each line.
            completed: Amount done before.
            stream: Where lines are written.
        """
        self.total, self.description, self.stream = total, description, stream
        self.done = self.first = completed
        self.started = self.last = time.monotonic()
        self.shown: Mapping[str, Any] = {}
        self.printed = False
        """Whether a line was printed."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Count progress, and print a line if it is due."""
        self.done += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.last >= LINE_EVERY_SECONDS:
            self.print_line()

    def print_line(self) -> None:
        """Print a progress line with the estimated time left."""
        self.last = time.monotonic()
        self.printed = True
        parts = [f"{self.description} {self.done:,}/{self.total:,}", *map(as_text, self.shown.items())]
        done = self.done - self.first
        if done > 0 and self.done < self.total:
            left = (self.last - self.started) / done * (self.total - self.done)
            parts.append(f"{clock(left)} left")
        print("  ".join(parts), file=self.stream, flush=True)


class ProgressBar:
    """A rich progress bar with the time left and other values."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Count progress and update the bar."""
        fields = tuple(map(as_text, shown.items()))
        self.bar.update(self.task, advance=amount, **({"shown": fields} if shown else {}))


ELSEWHERE: list[Callable[..., AbstractContextManager[Any]]] = []
"""Overrides of the progress display; the last one is used. Empty if this process shows its own progress."""


OPEN: list[str] = []
"""Displays that this process shows now, the outer one first."""


@contextmanager
def shown_by(show: Callable[..., AbstractContextManager[Any]]) -> Iterator[None]:
    """Show all progress with `show(total, description, completed=0)` in this context."""
    ELSEWHERE.append(show)
    try:
        yield
    finally:
        ELSEWHERE.remove(show)


@contextmanager
def show_progress(
    total: int, description: str, *, completed: int = 0, quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Any]:
    """Yield a progress display on standard error, so that standard output can be piped.

    Args:
        total: Number of items.
        description: What is counted.
        completed: Items done before.
        quiet: Show nothing.
        stream: Where to show it. Default: standard error.
    """
    stream = stream or sys.stderr
    if quiet:
        yield NoProgress()
    elif ELSEWHERE:
        with ELSEWHERE[-1](total, description, completed=completed) as display:
            yield display
    else:
        inner = bool(OPEN)
        OPEN.append(description)
        try:
            with own_display(stream, total, description, completed=completed, inner=inner) as display:
                yield display
        finally:
            OPEN.remove(description)


@contextmanager
def own_display(stream: TextIO, total: int, description: str, *, completed: int, inner: bool) -> Iterator[Any]:
    """Yield a display on a stream.

    Args:
        stream: Where to show it.
        total: Number of items.
        description: What is counted.
        completed: Items done before.
        inner: Whether another display is open, such as that of the training around an evaluation. What is short then
            leaves no line: its result is logged.
    """
    if stream.isatty():
        with WAITS.hidden(), rich_bar(stream, transient=inner) as bar:
            yield ProgressBar(bar, bar.add_task(description, total=total, completed=completed, shown=()))
        return
    lines = PlainProgress(total, description, completed=completed, stream=stream)
    try:
        yield lines
    finally:
        if lines.printed or not inner:
            lines.print_line()


def rich_bar(stream: TextIO, *, transient: bool = False) -> Any:
    """Return a rich progress display whose lines fit the terminal; a transient one is erased at its end."""
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    console = Console(file=stream, markup=False)

    class Line(ProgressColumn):
        """A whole line of the display, at most as wide as the terminal."""

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

    return Progress(Line(), console=console, transient=transient)


@dataclass(frozen=True)
class FittingLine:
    """A progress line: text, a bar of `bar` columns, and text, separated by spaces."""

    head: str
    bar: int
    rest: str

    @property
    def width(self) -> int:
        """Width in terminal columns."""
        return len(self.head) + 1 + (self.bar + 1 if self.bar else 0) + len(self.rest)


def fitting(
    width: int, *, head: str, count: str, elapsed: float | None, left: float | None, fields: Sequence[str]
) -> FittingLine:
    """Return the most detailed line that fits a width.

    Fields are dropped first, from the last one; then the bar is shortened, and the elapsed time, the first field,
    the bar and the time left are dropped in this order. The count is always shown.

    Args:
        width: Width of the terminal in columns.
        head: What is counted.
        count: How much of it is done.
        elapsed: Seconds since the start, or None.
        left: Estimated seconds left, or None if unknown.
        fields: Other values, the most important first.
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
    """Format a shown value with its label."""
    name, value = item
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{LABELS.get(name, name)} {value}"


def clock(seconds: float) -> str:
    """Format seconds as M:SS or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
