"""What a shard of files is, and how its bytes are opened."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from partita_schema.errors import DataError

SKIP = 1 << 20
"""Bytes that are read over at a time where a file cannot seek."""


FOREIGN = frozenset(
    ("zstandard", "zstd", "fsspec", "aiohttp", "requests", "httpx", "huggingface_hub", "botocore", "s3fs", "gcsfs")
)
"""Libraries under fsspec whose errors are no OSError."""


@dataclass(frozen=True)
class Piece:
    """A file or a part of it."""

    path: str
    """Place of the file, local or a URL."""
    label: str
    """Name of the file in keys, and where the part begins if it was cut by bytes."""
    kind: str
    """Format."""
    start: int | None = None
    """First byte, or of Parquet first row, of a part; None for a file that is not cut."""
    end: int | None = None
    """The byte, or row, behind the part."""
    part: int = 0
    """Of rows `part`, `part + parts` ... of what lies in the range; 0 of 1 for all."""
    parts: int = 1


@contextmanager
def opened(path: str, label: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed. Raises DataError where they cannot be read, while it is open too."""
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        with fsspec.open(path, "rb", compression="infer") as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{label} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in FOREIGN:
            raise DataError(f"{label} cannot be read: {error}") from error
        raise


def at_offset(stream: BinaryIO, offset: int) -> None:
    """Move a stream that was just opened to a byte, by reading where it cannot seek."""
    if not offset:
        return
    try:
        if stream.seekable():
            stream.seek(offset)
            return
    except (OSError, ValueError):  # says that it can, and cannot
        pass
    left = offset
    while left and (data := stream.read(min(left, SKIP))):
        left -= len(data)
