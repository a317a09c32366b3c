"""The lock that lets only one process open a run."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from partita_schema.errors import ResumeError


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock the run in this context. The lock is released when the process ends, however it ends."""
    with (folder / ".lock").open("w") as file, not_inherited(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"{folder} is in use by another process; wait for it, or give this run another folder with --run"
            raise ResumeError(message) from None
        yield


@contextmanager
def not_inherited(file: TextIO) -> Iterator[None]:
    """In this context, forks of this process close the file.

    Data workers outlive a killed process by seconds and would keep its lock.
    """
    LOCKED.add(file)
    try:
        yield
    finally:
        LOCKED.discard(file)


def close_locked() -> None:
    """Close the lock files in a forked process."""
    for file in LOCKED:
        file.close()


LOCKED: set[TextIO] = set()
os.register_at_fork(after_in_child=close_locked)
