"""Files that are replaced atomically: a reader sees all of the new content or all of the old. The cache of the user."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def temporary_path(path: Path) -> Path:
    """Return the temporary name of a file that is being written."""
    return path.with_name(f".{path.name}.writing")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` on exit, once it is on disk; `path` is unchanged after an error."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, not created yet, that replaces `path` on exit; `path` is unchanged after an error.

    The old folder is removed before the new one is renamed, so a kill in between leaves only the temporary folder.
    """
    temporary = temporary_path(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it holds all of `content`, or what it held before."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache_folder() -> Path:
    """Return the folder in `PARTITA_CACHE`, else `partita` in the user's cache folder; `~` is the home of the user.

    If there is no home, as in many containers, return `partita` in the folder of temporary files.
    """
    try:
        if named := os.environ.get("PARTITA_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partita"
    except RuntimeError:  # raised by `home` and `expanduser`
        return Path(tempfile.gettempdir()) / "partita"
