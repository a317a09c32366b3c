"""How rows are cut into batches: a union on `type`."""

from typing import Annotated, Literal

from pydantic import Field

from partita_schema.base import Base, Count, Flag, Share


class AutoBatching(Base):
    """Chosen from the lengths of the rows; the log says what was chosen and why."""

    type: Literal["auto"] = "auto"
    """Chosen from the lengths of the rows."""


class FixedBatching(Base):
    """Rows in shuffled order, cut every batch_size rows."""

    type: Literal["fixed"]
    """No sorting."""
    shuffle: Flag = True
    """A new order each epoch."""
    drop_last: Flag = False
    """Leave out the rows at the end of an epoch that do not fill a batch."""


class SortedBatching(Base):
    """What batchings share that sort windows of shuffled rows by length."""

    window: Count = 2048
    """Rows sorted together; more is less padding and less randomness."""
    noise: Share = 0.0
    """How much lengths are disturbed before sorting, as a share: 0.1 for up to 10 %. More is more padding and more
    randomness."""
    longest_first: Flag = False
    """Begin each epoch with the longest rows, so that what does not fit memory fails at once."""


class BucketBatching(SortedBatching):
    """Rows of like length together: windows of shuffled rows are sorted by length, cut, and the batches shuffled."""

    type: Literal["bucket"]
    """Sorted windows."""
    length_spread: Count | None = None
    """Most tokens between the shortest and the longest row of a batch; such batches may hold fewer rows. Default: any
    number."""
    drop_last: Flag = False
    """Leave out batches with fewer than batch_size rows."""


class TokenBudgetBatching(SortedBatching):
    """As many rows of like length as a number of tokens allows, padding included."""

    type: Literal["token_budget"]
    """Batches of so many tokens."""
    max_tokens: Count | Literal["auto"] = "auto"
    """Tokens of a batch, padding included. auto: what batch_size: auto measures, times the longest row."""
    max_rows: Count | None = None
    """Most rows of a batch. Default: no limit."""
    multiple_of: Count = 1
    """Batches of more rows than this hold a multiple of it."""


class PackBatching(Base):
    """Several rows in one line of tokens, without seeing each other: no padding but at the end of a line."""

    type: Literal["pack"]
    """Rows in lines of so many tokens."""
    max_tokens: Count | None = None
    """Tokens of a line. Default: preprocessing.global_max_sequence_length, else the longest row."""
    window: Count = 2048
    """Rows packed together; more is fuller lines and less randomness."""


Batching = Annotated[
    AutoBatching | FixedBatching | BucketBatching | TokenBudgetBatching | PackBatching, Field(discriminator="type")
]
