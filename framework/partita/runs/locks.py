"""Locks on files. The operating system releases them when a process ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from partita_schema.errors import ResumeError, WriteError

LOCK = ".lock"
"""Name of the lock file of a run."""
PAUSE_SECONDS = 0.05
"""Pause before a lock is tried for the second time."""
LOCKED = set[TextIO]()
"""Lock files that forks of this process close."""


def try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Lock an open file without waiting, and return whether that worked.

    Args:
        descriptor: Its file descriptor.
        path: The file, for the error.
        shared: Whether other processes may hold the lock too, if they share it.

    Raises:
        WriteError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise WriteError(f"{path} cannot be locked: {error.strerror}; use a folder on another file system") from error
    return True


def try_lock_twice(file: TextIO, path: Path) -> bool:
    """Lock a file as `try_lock` does, and once more a moment later: `is_locked` may hold the lock for an instant."""
    if try_lock(file.fileno(), path):
        return True
    time.sleep(PAUSE_SECONDS)
    return try_lock(file.fileno(), path)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock the run in this context. Raise ResumeError if another process holds the lock."""
    path = folder / LOCK
    with path.open("w") as file, not_inherited(file):
        if not try_lock_twice(file, path):
            raise ResumeError(
                f"{folder} is in use by another process; wait for it, or give this run another folder with --run"
            )
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a process has the run open."""
    path = folder / LOCK
    try:
        with path.open() as file:
            return not try_lock(file.fileno(), path, shared=True)
    except (OSError, WriteError):  # there is no lock file, or there are no locks
        return False


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


os.register_at_fork(after_in_child=close_locked)
