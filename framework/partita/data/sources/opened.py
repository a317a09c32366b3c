"""Open files for reading, decompressed, with one error type for all failures."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from partita_schema.errors import DataError

FOREIGN = frozenset(
    ("zstandard", "zstd", "fsspec", "aiohttp", "requests", "httpx", "huggingface_hub", "botocore", "s3fs", "gcsfs")
)
"""Libraries used by fsspec whose exceptions are not OSError."""


@contextmanager
def opened(path: str, label: str) -> Iterator[BinaryIO]:
    """Open a file and yield its decompressed bytes. Raise DataError if opening or reading fails."""
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        file = fsspec.open(path, "rb", compression="infer")
    except ValueError as error:  # a compression whose library is not installed
        raise DataError(f"{label} cannot be read: {error}") from error
    try:
        with file as stream:
            yield stream
    except (OSError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{label} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] in FOREIGN:
            raise DataError(f"{label} cannot be read: {error}") from error
        raise
