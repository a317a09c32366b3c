"""What a command waits for before it has progress to show, such as the import of libraries.

On a terminal it is a line that the next output replaces, elsewhere a separate line.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ERASE = "\r\x1b[2K"
"""Moves to the start of the line of a terminal and clears it."""


class Waits:
    """The waits of this process, and whether they are shown."""

    def __init__(self) -> None:
        self.shown = False
        self.lines: list[str] = []
        """Waits on the terminal, the outer one first."""

    def erase(self) -> None:
        """Clear the line on the terminal before other output."""
        if self.lines:
            sys.stderr.write(ERASE)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show no line in the context, in which a progress bar uses the terminal."""
        self.erase()
        lines, self.lines = self.lines, []
        try:
            yield
        finally:
            self.lines = lines
            self.draw()

    def draw(self) -> None:
        """Write the line again after other output."""
        if self.lines:
            sys.stderr.write(self.lines[-1])
            sys.stderr.flush()


WAITS = Waits()


def show_waits(*, quiet: bool = False) -> None:
    """Show what this process waits for, from now on; in a program that only uses the Python interface it is hidden."""
    WAITS.shown = not quiet


@contextmanager
def waiting(what: str, *, line: bool = True) -> Iterator[None]:
    """Show on standard error what the program waits for in the context, such as `loading libraries`.

    `line` says whether to print a line where standard error is no terminal.
    """
    if not WAITS.shown:
        yield
        return
    if not sys.stderr.isatty():
        if line:
            sys.stderr.write(f"{what}\n")
            sys.stderr.flush()
        yield
        return
    WAITS.erase()
    WAITS.lines.append(f"{what[:70]} ...")
    WAITS.draw()
    try:
        yield
    finally:
        WAITS.erase()
        WAITS.lines.pop()
        WAITS.draw()
