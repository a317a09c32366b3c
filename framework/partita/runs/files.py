"""Files of a run: whole or not at all, in JSON that every reader takes, and in words where a disk refuses."""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from partita_schema.errors import WriteError

WRITE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.ENOTDIR,
)
"""What the system says when a folder takes no more, or not from this user, or is none."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file holds all of `content` or what it held before."""
    beside = path.with_name(f".{path.name}.writing")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers without a value, such as the error of no answer at all, are null."""
    return json.dumps(without_infinities(value), indent=indent)


def without_infinities(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder. In this context a full disk, or a folder that must not be written, is a WriteError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        reason = write_failure(error, folder=folder)
        if reason is None:
            raise
        message = f"the run in {folder} cannot be written: {reason}; mend that and start the same command again"
        raise WriteError(message) from error


def write_failure(error: Exception, *, folder: Path) -> str | None:
    """Why something in the folder could not be written; None where the error is about something else."""
    if isinstance(error, OSError):
        elsewhere = error.filename is not None and not Path(str(error.filename)).is_relative_to(folder)
        return None if elsewhere or error.errno not in WRITE_ERRORS else error.strerror
    return next((os.strerror(number) for number in WRITE_ERRORS if os.strerror(number) in str(error)), None)
