"""The lock of the folder of a sweep. The command and all processes that run its trials hold it."""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from partita.runs.locks import LOCK, try_lock
from partita_schema.errors import PartitaError, ResumeError

LOCK_SECONDS = 10.0
"""Seconds to wait for the processes of a killed sweep to end."""


@dataclass(frozen=True)
class FolderLock:
    """A lock that this process holds."""

    folder: Path
    descriptor: int
    """File descriptor, which local processes inherit."""
    token: str
    """Content of the lock file, by which other machines recognize the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[FolderLock]:
    """Lock the folder of a sweep in this context.

    The lock is taken alone and then shared, so that workers on other machines can hold it too (`join_lock`).

    Raises:
        ResumeError: Another command works in the folder. Trials of a killed one end within moments.
    """
    with (folder / LOCK).open("a+") as file:
        last = time.monotonic() + LOCK_SECONDS
        while not try_lock(file.fileno(), folder / LOCK):
            if time.monotonic() > last:
                message = f"{folder} is in use by another process; wait for it, or name another folder with --folder"
                raise ResumeError(message)
            time.sleep(0.1)
        token = secrets.token_hex(8)
        file.truncate(0)
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_SH)
        yield FolderLock(folder, file.fileno(), token)


def join_lock(folder: Path, token: str) -> int:
    """Hold the lock of a command in this process too, and return its file descriptor.

    Args:
        folder: The folder of the sweep.
        token: The token of the command's lock.

    Raises:
        PartitaError: The folder is another one on this machine, or the command has ended.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        raise not_shared(folder) from None
    try:
        if os.read(descriptor, 100).decode() != token:
            raise not_shared(folder)
        if not try_lock(descriptor, folder / LOCK, shared=True):
            raise PartitaError(f"{folder} is in use by another process; wait for it, and rerun the same command")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def not_shared(folder: Path) -> PartitaError:
    """Return the error of a worker that sees another folder than the command."""
    return PartitaError(
        f"the folder of the sweep, {folder}, is another one on {os.uname().nodename}: name one with --folder that all "
        "machines of the cluster see under this name"
    )
