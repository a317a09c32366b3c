"""The Stream interface: rows in shards, read from any position without reading the rows before it twice."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from partita.data.formats.base import Position, StreamRow


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
