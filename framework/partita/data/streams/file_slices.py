"""What a shard of files is."""

from dataclasses import dataclass
from typing import BinaryIO

from partita.data.reading.lines import BLOCK
from partita.data.reading.records import MAX_ROW_BYTES

SKIP = 1 << 20
"""Bytes that are read over at a time where a file cannot seek."""


@dataclass(frozen=True)
class FileSizes:
    """From which sizes on files are cut, and how much of one is read at a time."""

    small_bytes: int = 1 << 20
    """Smaller files are dealt, not cut: reading them several times costs nothing, and lines keep their numbers."""
    fine_bytes: int = 16 << 20
    """Parts of a larger file hold at least this many bytes, where lanes are even without smaller ones."""
    block_bytes: int = BLOCK
    """Bytes of lines that are read at a time."""


DEFAULT_SIZES = FileSizes()


@dataclass(frozen=True)
class FileSlice:
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
    max_row_bytes: int = MAX_ROW_BYTES
    """Longest line; a longer one is a bad row."""
    file_sizes: FileSizes = DEFAULT_SIZES


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
