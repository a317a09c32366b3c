"""The Stream interface: rows in shards, read from any position without reading the rows before it twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Position = int | list[Any]
"""Start of a row in its shard, in the stream's own terms: a byte, a row, a row group and a row.

An integer or a list of integers.
"""


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
