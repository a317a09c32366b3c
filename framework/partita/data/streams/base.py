"""The Stream interface: rows in shards, read from any position without reading the rows before it twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from partita.data.contract import Position
from partita.data.sources.lines import BLOCK
from partita.data.sources.records import MAX_ROW_BYTES


@dataclass(frozen=True)
class StreamRow:
    """A row of a shard, or the reason why it is bad. Can be pickled for other processes."""

    shard: int
    """Index of the shard."""
    number: int
    """Identifies the row in its shard: the line or row number from 1; in a part of a file, the row's first byte."""
    row: bytes | dict[str, Any]
    """The row, as a JSON object in UTF-8 or as a mapping."""
    reason: str = ""
    """Why the row cannot be read; empty for a good one."""
    raw: str = ""
    """The content of a bad row."""


class Stream(Protocol):
    """Rows in shards. Reading is repeatable: the same shard from the same position yields the same rows."""

    @property
    def name(self) -> str:
        """Name in logs and counts."""

    @property
    def fingerprint(self) -> str:
        """A hash of what is known without reading: names, sizes, revision."""

    @property
    def shards(self) -> Sequence[str]:
        """Label of each shard, such as `a.jsonl`, or `a.jsonl@1048576` for a part of a file.

        Keys of rows are `label:number` and are unique; shards that share the rows of a file share its label.
        """

    @property
    def sizes(self) -> Sequence[float]:
        """Estimated amount of rows in each shard, in bytes or any other unit, used to balance shard groups."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard from a position on (None: the start), each with the position after it.

        Raises:
            DataError: If the shard cannot be read.
        """


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
