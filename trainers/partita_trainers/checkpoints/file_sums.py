"""Checksums of the files of a checkpoint or saved model, stored next to them in `partita-checksums.json`.

The file is written last, after all others are complete. Folders without one, such as those of transformers and peft,
are read without verification.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath

from partita_schema.common.checksums import DamagedError, sealed, unsealed
from partita_schema.common.files import temporary_path, write_atomically

FILE = "partita-checksums.json"
FORMAT = 1
WEIGHTS = (".safetensors", ".bin")
THREADS = 4
"""Files read in parallel; hashing releases the GIL."""

SETTLED_NS = 10**9
"""Minimum age of a file for its modification time to reveal every later change; file system clocks are coarse."""

Stamp = tuple[int, int, int]
"""Size, modification time and inode of a file."""

_read: dict[Path, tuple[Stamp, str]] = {}
"""Hashes of files that this process has read, so that no file is read twice."""


def write_sums(folder: Path, *, files: list[Path] | None = None) -> None:
    """Write the checksums of all files in a folder, or of `files`."""
    paths = all_files(folder) if files is None else files
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, file_sums(paths), strict=True)
    }
    write_atomically(folder / FILE, json.dumps(sealed({"format": FORMAT, "files": entries}), indent=1))


@contextmanager
def summed(folder: Path) -> Iterator[None]:
    """Write checksums on exit for the model that is written into the folder inside the context.

    Files that existed before and did not change are not part of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)
    before = {path: stamp(path) for path in model_files(folder)}
    yield
    write_sums(folder, files=[path for path in model_files(folder) if before.get(path) != stamp(path)])


def read_sums(folder: Path) -> dict[str, tuple[int, str]] | None:
    """Return size and hash by file; None if the folder has no checksums. Raises DamagedError."""
    path = folder / FILE
    try:
        entries = unsealed(path.read_bytes(), required=True)["files"]
        sums = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise DamagedError(f"{path} {error}") from None
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    outside = next((name for name in sums if name.startswith("/") or ".." in PurePosixPath(name).parts), None)
    if outside is not None:
        raise DamagedError(f"{path} names {outside}, which is not in its folder")
    return sums


def check_sums(folder: Path, *, weights: bool = True, required: bool = False) -> None:
    """Raise DamagedError with the first file that differs from its checksum.

    Args:
        folder: A checkpoint or a saved model.
        weights: Whether to verify weights too; otherwise only small files are read.
        required: Whether a folder without checksums counts as damaged.
    """
    entries = read_sums(folder)
    if entries is None:
        if required:
            raise DamagedError(f"{folder / FILE} is missing")
        return
    wanted = {folder / name: entry for name, entry in entries.items() if weights or not name.endswith(WEIGHTS)}
    for path, (size, _) in wanted.items():
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        if path.stat().st_size != size:
            raise DamagedError(f"{path} has {path.stat().st_size:,} bytes and was written with {size:,}")
    try:
        for path, digest in zip(wanted, file_sums(list(wanted)), strict=True):
            if digest != wanted[path][1]:
                raise DamagedError(f"{path} is not as it was written (its checksum differs)")
    except OSError as error:
        raise DamagedError(f"{error.filename} cannot be read: {error.strerror}") from None


def file_sums(paths: list[Path]) -> list[str]:
    """Return the SHA-256 of each file. Files that are unchanged since this process read them are not read again."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(file_sum, paths))


def file_sum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    resolved, now = path.resolve(), stamp(path)
    known = _read.get(resolved)
    if known is not None and known[0] == now:
        return known[1]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - now[1] > SETTLED_NS:
        _read[resolved] = (now, digest)
    return digest


def stamp(path: Path) -> Stamp:
    """Return the size, modification time and inode of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def all_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders in a stable order, without the checksums themselves."""
    return listed(folder, folder.rglob("*"))


def model_files(folder: Path) -> list[Path]:
    """Return the files that may belong to a saved model: those at the top, and those in `base/`."""
    return listed(folder, chain(folder.iterdir(), folder.glob("base/**/*")))


def listed(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths` in sorted order, without the checksums themselves."""
    own = (folder / FILE, temporary_path(folder / FILE))
    return sorted(path for path in paths if path.is_file() and path not in own)
