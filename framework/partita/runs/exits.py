"""Calls of `sys.exit` in code of the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from partita_schema.errors import TrainingError, exit_call, raised_at


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise TrainingError if code in this context calls `sys.exit`, which would end the command with any status."""
    try:
        yield
    except SystemExit as error:
        advice = "remove that call, or raise an exception, and rerun the same command to resume"
        raise TrainingError(f"code of the training called {exit_call(error)}{raised_at(error)}", advice) from error
