"""What a stream is: rows in shards, read from any position in a shard without reading what stands before it twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Position = int | list[Any]
"""Where a row starts in its shard, as the stream understands it: a byte, a row, a row group and a row ... A number
or a list of numbers, all whole."""


@dataclass(frozen=True)
class StreamRow:
    """A row of a shard, or what is wrong with it. Can be sent to other processes."""

    shard: int
    """Number of the shard."""
    number: int
    """What names the row in its shard: a line or row from 1; in a part of a file, the byte where the row starts."""
    row: bytes | dict[str, Any]
    """The row, as a JSON object in UTF-8 or as a mapping."""
    reason: str = ""
    """Why the row cannot be read; empty for a good one."""
    raw: str = ""
    """What stands there, for bad rows."""


class Stream(Protocol):
    """Rows in shards. Reading is repeatable: the same shard from the same position gives the same rows."""

    @property
    def name(self) -> str:
        """Name in logs and counts."""

    @property
    def fingerprint(self) -> str:
        """A hash of what is known without reading: names, sizes, revision."""

    @property
    def shards(self) -> Sequence[str]:
        """Label of each shard, such as `a.jsonl`, or `a.jsonl@1048576` for a part of a file.

        Keys of rows are `label:number`, and no two rows share one; shards that deal the rows of a file share its label.
        """

    @property
    def sizes(self) -> Sequence[float]:
        """How much of the rows each shard is thought to have, in bytes or any other unit; lanes are evened by it."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Rows of a shard from a position on (None: from its beginning), each with the position behind it.

        Raises DataError where the shard cannot be read.
        """
