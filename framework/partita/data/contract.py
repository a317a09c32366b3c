"""Interfaces of the classes that a configuration may use instead of parts of the data pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from partita.data.batching.plan import PlannedBatch
    from partita.data.formats.base import Position
    from partita.data.formatting.base import FormattedText
    from partita.data.tokenized import TokenizedDataset
    from partita_trainers.base import Batch


class DataSource(Protocol):
    """Interface of sources, created with the `options` of the section. A class with `__iter__` is a source as well.

    A row is a mapping of column names to values. Reading must be repeatable: every call of `rows` yields the same rows.
    An attribute `fingerprint`, a string, may identify the state of the data.
    """

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return all rows from the first one. A streamed source may be endless."""


class ShardedDataSource(Protocol):
    """Interface of streamed sources that resume from any position at once.

    A position is an integer, or a list of integers; checkpoints keep it. An attribute `shards` gives the number of
    shards; default 1.
    """

    def read(self, shard: int, start: "Position | None") -> "Iterable[tuple[Mapping[str, Any], Position]]":
        """Yield the rows of a shard, each with the position after it, from `start`; None is the beginning."""


class RowFormatter(Protocol):
    """Interface of formatters, created as `Class(config, tokenizer=tokenizer)`."""

    def format_all(
        self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], *, supervised: bool
    ) -> Sequence["FormattedText"]:
        """Return the text of each row.

        Args:
            rows: Rows without defects: values by feature name.
            keys: The key of each row, stable under shuffling.
            supervised: Whether to add the answer. Else the text ends where the model starts to answer.
        """


class Collator(Protocol):
    """Interface of classes that build the tensors of a batch, created as `Class()`."""

    def __call__(self, encoded: "TokenizedDataset", planned: "PlannedBatch", pad_token_id: int) -> "Batch":
        """Return the batch of the planned rows. `collate` is the built-in function."""
