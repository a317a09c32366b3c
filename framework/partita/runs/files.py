"""Files of a run: output files, strict JSON, and readable errors when a disk refuses a write."""

import errno
import fcntl
import glob
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from partita.runs.locks import try_lock
from partita_schema.common.files import sync_folder
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
    errno.ELOOP,
)
"""Error numbers of a folder that is full, read-only, not permitted, or not a folder."""


MAX_LINKS = 40
"""Symbolic links followed in a chain, as many as Linux follows."""
WRITE_ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit on the size of files, or write to another path",
    errno.EROFS: "write to another path",
    errno.EACCES: "change the permissions there, or write to another path",
    errno.EPERM: "change the permissions there, or write to another path",
    errno.ENOENT: "its folder is gone or takes no new files; write to another path",
    errno.ENOTDIR: "there is a file where a folder is needed; write to another path",
    errno.EEXIST: "there is a file where a folder is needed; write to another path",
    errno.EISDIR: "name a file in that directory",
    errno.ENAMETOOLONG: "write a shorter name",
    errno.ELOOP: "symbolic links are not followed there; remove the link, or name its target",
}
"""Advice by error number."""


def why_not_written(error: OSError, path: Path) -> str:
    """Return a message with the file, the reason and the fix, without a full stop."""
    advice = WRITE_ADVICE.get(error.errno or 0, "write to another path")
    return f"{path} cannot be written: {error.strerror or error}; {advice}"


def open_private(path: Path, flags: int) -> int:
    """Open a regular file readable by its owner only, and return its descriptor.

    Raises OSError for a symbolic link and for anything else that is not a regular file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def append_whole(descriptor: int, data: bytes) -> None:
    """Append all of the data to a file, or nothing: after an error or Ctrl-C the file has its previous size."""
    size, rest = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while rest:  # a full disk may take a part, and the next call raises
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


def output_file(path: Path) -> Path:
    """Return the file that an output path names; symbolic links are followed, as by a shell's `>`.

    A link that another user has created in a world-writable folder is refused, by the rule of Linux's
    fs.protected_symlinks. Raises OSError for such a link, and for anything that is not a regular file.
    """
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            break
        folder = path.parent.stat()
        if folder.st_mode & stat.S_IWOTH and path.lstat().st_uid not in (os.geteuid(), folder.st_uid):
            raise OSError(errno.ELOOP, "A symbolic link of another user in a folder that everybody may write")
        path = path.parent / path.readlink()
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if path.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")
    return path


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file next to `path` that replaces `path` once it is complete and on disk.

    Its name is random and it is never opened through a link, so that a shared folder is safe. Files left by killed
    processes are removed.
    """
    remove_abandoned(path)
    temporary, descriptor = open_temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(descriptor)
            temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_temporary(path: Path) -> tuple[Path, int]:
    """Create an empty file with a random name next to `path`, and return its path and descriptor."""
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")
    return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def remove_abandoned(path: Path) -> None:
    """Remove the files of `new_file` that no process writes any more."""
    for left in path.parent.glob(f".{glob.escape(path.name[:100])}.*.partial"):
        with suppress(OSError, WriteError):  # it belongs to another user, or there are no locks
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if try_lock(descriptor, left):
                    left.unlink()
            finally:
                os.close(descriptor)


def rank_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's own file next to `path`, which is that of rank 0."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path


def rank_paths(path: Path) -> list[Path]:
    """Return the files of ranks other than 0 next to `path`, as `rank_path` names them."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank-*{glob.escape(path.suffix)}"))


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """Return JSON that every parser accepts: NaN and infinities become null."""
    return json.dumps(without_infinities(value), indent=indent)


def without_infinities(value: Any) -> Any:
    """Replace NaN and infinities with None in nested values."""
    if isinstance(value, Mapping):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create the folder, and raise an error of writing to it in this context, such as a full disk, as WriteError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the folder {folder} cannot be created: {error.strerror}; name another one"
        raise WriteError(message) from error
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = write_failure(error, folder=folder)
        if reason is None:
            raise
        message = f"files in {folder} cannot be written: {reason}; fix that and rerun the same command"
        raise WriteError(message) from error


def write_failure(error: Exception, *, folder: Path) -> str | None:
    """Return why a file in the folder could not be written; None if the error has another cause."""
    if isinstance(error, OSError):
        elsewhere = error.filename is not None and not Path(str(error.filename)).is_relative_to(folder)
        return None if elsewhere or error.errno not in WRITE_ERRORS else error.strerror
    return next((os.strerror(number) for number in WRITE_ERRORS if os.strerror(number) in str(error)), None)
