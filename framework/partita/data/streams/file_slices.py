"""Part of a file that a shard reads."""

from dataclasses import dataclass
from typing import BinaryIO

from partita.data.sources.lines import BLOCK
from partita.data.sources.records import MAX_ROW_BYTES

SKIP = 1 << 20
"""Bytes that are skipped at a time in a file that cannot seek."""


@dataclass(frozen=True)
class FileSizes:
    """Sizes that decide how files are split, and how much is read at a time."""

    small_bytes: int = 1 << 20
    """Smaller files are read by every shard, not split: that is cheap, and lines keep their numbers."""
    fine_bytes: int = 16 << 20
    """Minimum size of a slice of a larger file, if shard groups are balanced without smaller ones."""
    block_bytes: int = BLOCK
    """Bytes of lines that are read at a time."""


DEFAULT_SIZES = FileSizes()


@dataclass(frozen=True)
class FileSlice:
    """A file or a part of it."""

    path: str
    """Path or URL of the file."""
    label: str
    """Name of the file in keys, with the first byte of a byte range."""
    kind: str
    """Format."""
    start: int | None = None
    """First byte, or first row of Parquet, of a range; None for a whole file."""
    end: int | None = None
    """The byte, or row, after the range."""
    part: int = 0
    """Keep the rows `part`, `part + parts` ... of the range; 0 of 1 for all."""
    parts: int = 1
    max_row_bytes: int = MAX_ROW_BYTES
    """Maximum size of a line in bytes; a longer one is a bad row."""
    file_sizes: FileSizes = DEFAULT_SIZES


def at_offset(stream: BinaryIO, offset: int) -> None:
    """Move a newly opened stream to a byte, by reading if it cannot seek."""
    if not offset:
        return
    try:
        if stream.seekable():
            stream.seek(offset)
            return
    except (OSError, ValueError):  # some streams claim to be seekable and are not
        pass
    left = offset
    while left and (data := stream.read(min(left, SKIP))):
        left -= len(data)
