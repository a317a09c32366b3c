"""Policies that cut the rows of a window into batches: pure functions of the lengths and a random generator.

Every row of a window is in exactly one batch, except rows removed by `drop_last`. Indices refer to the window, from 0;
batches are returned in the order in which they are used.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from partita.data.batching.plan import PlannedBatch, alone
from partita_schema.errors import DataError
from partita_schema.sections.batching import (
    AutoBatching,
    Batching,
    BucketBatching,
    ChunkBatching,
    FixedBatching,
    PackBatching,
    TokenBudgetBatching,
)

FIXED_WINDOW = 2048
"""Rows in a window if nothing is sorted; a stream is shuffled over this many rows."""
ORDERED_WINDOW = 256
"""Rows in a window if rows keep their order, so that a stream's first batch need not wait for many others."""
FIRST_WINDOW = 64
"""Rows in the first of these windows; as many as a worker tokenizes at a time."""


class Policy(Protocol):
    """Cuts the rows of a window into batches."""

    @property
    def window(self) -> int:
        """Number of rows that are planned together."""

    @property
    def first_window(self) -> int:
        """Number of rows in the first window of a stream; each following one has twice as many, up to `window`."""

    @property
    def consecutive_rows(self) -> int | None:
        """Number of consecutive rows in a batch; None if a batch may hold any rows of its window."""

    @property
    def shuffle_rows(self) -> bool:
        """Whether rows are shuffled before they are cut into windows."""

    @property
    def longest_first(self) -> bool:
        """Whether an epoch starts with the window and the batch that hold the longest row."""

    @property
    def max_row_tokens(self) -> int | None:
        """Tokens of the longest row that can be planned; None for no limit."""

    def cut(self, lengths: np.ndarray, rng: np.random.Generator) -> list[PlannedBatch]:
        """Return the batches of a window, given the tokens of its rows, [n]. Raise DataError if a row is too long."""

    def count(self, rows: int) -> int | None:
        """Return the number of batches in an epoch of `rows` rows; None if it depends on their lengths."""


@dataclass(frozen=True)
class Fixed:
    """Rows in the given order, cut every `batch_size` rows."""

    batch_size: int
    shuffle_rows: bool = True
    drop_last: bool = False
    rows_together: int | None = None
    """Rows in a window; None for a default that suits the order."""

    longest_first = False
    max_row_tokens = None

    @property
    def window(self) -> int:
        default = FIXED_WINDOW if self.shuffle_rows else ORDERED_WINDOW
        return whole_batches(self.rows_together or default, self.batch_size)

    @property
    def first_window(self) -> int:
        """Smaller if rows keep their order: batches are the same in any window, and the first one is ready sooner."""
        if self.shuffle_rows or self.rows_together is not None:
            return self.window
        return min(self.window, whole_batches(FIRST_WINDOW, self.batch_size))

    @property
    def consecutive_rows(self) -> int | None:
        return None if self.shuffle_rows or self.rows_together is not None else self.batch_size

    def cut(self, lengths: np.ndarray, rng: np.random.Generator) -> list[PlannedBatch]:
        cuts = even_cuts(len(lengths), self.batch_size)
        return batches_at(np.arange(len(lengths)), cuts, fullest=self.batch_size if self.drop_last else 0)

    def count(self, rows: int) -> int | None:
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)


class SortedWindows:
    """Base of policies that sort a window: the first window of a stream is a whole one, or its batches would differ."""

    window: int

    consecutive_rows = None

    @property
    def first_window(self) -> int:
        return self.window


class TokenLimited(SortedWindows):
    """Base of policies whose batches, or sequences, hold at most `max_tokens`: no row may be longer."""

    max_tokens: int

    @property
    def max_row_tokens(self) -> int:
        return self.max_tokens


@dataclass(frozen=True)
class Bucket(SortedWindows):
    """Rows sorted by length, cut every `batch_size` rows; rows of equal length keep their shuffled order."""

    batch_size: int
    window: int
    """A multiple of the batch size, so that only the last window can hold a smaller batch."""
    noise: float = 0.0
    length_spread: int | None = None
    drop_last: bool = False
    longest_first: bool = False

    shuffle_rows = True
    max_row_tokens = None

    def cut(self, lengths: np.ndarray, rng: np.random.Generator) -> list[PlannedBatch]:
        order = sorted_order(lengths, noise=self.noise, rng=rng)
        if self.length_spread is None:
            cuts = even_cuts(len(lengths), self.batch_size)
        else:
            cuts = spread_cuts(lengths[order], size=self.batch_size, spread=self.length_spread)
        return shuffled(batches_at(order, cuts, fullest=self.batch_size if self.drop_last else 0), rng)

    def count(self, rows: int) -> int | None:
        if self.length_spread is not None:
            return None
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)


@dataclass(frozen=True)
class TokenBudget(TokenLimited):
    """Batches of rows of similar length: rows times the longest row never exceed `max_tokens`, padding included."""

    max_tokens: int
    window: int
    max_rows: int | None = None
    multiple_of: int = 1
    noise: float = 0.0
    longest_first: bool = False

    shuffle_rows = True

    def cut(self, lengths: np.ndarray, rng: np.random.Generator) -> list[PlannedBatch]:
        refuse_longer(lengths, self.max_tokens)
        order = sorted_order(-lengths, noise=self.noise, rng=rng)
        cuts = budget_cuts(lengths[order], budget=self.max_tokens, rows=self.max_rows, multiple_of=self.multiple_of)
        return shuffled(batches_at(order, cuts), rng)

    def count(self, rows: int) -> int | None:
        return None


@dataclass(frozen=True)
class Pack(TokenLimited):
    """Pack several rows into sequences of at most `max_tokens`, with `sequences` sequences per batch.

    Best fit decreasing (Johnson et al. 1974): the longest row first, each to the fullest sequence with room for it.
    """

    max_tokens: int
    sequences: int
    window: int

    shuffle_rows = True
    longest_first = False

    def cut(self, lengths: np.ndarray, rng: np.random.Generator) -> list[PlannedBatch]:
        refuse_longer(lengths, self.max_tokens)
        sequence_n, filled = best_fit(lengths, self.max_tokens)
        # Sequences that are equally full are batched together, in random order. The room left at the end of a window
        # then costs one batch, not one sequence in many batches.
        mixed = rng.permutation(len(filled))
        rank = np.empty(len(filled), dtype=np.int64)
        rank[mixed[np.argsort(-filled[mixed], kind="stable")]] = np.arange(len(filled))
        rank_n = rank[sequence_n]
        order = np.argsort(rank_n, kind="stable")
        edges = np.searchsorted(rank_n[order], np.arange(0, len(filled) + self.sequences, self.sequences))
        batches = [
            PlannedBatch(order[start:end], rank_n[order[start:end]] - number * self.sequences)
            for number, (start, end) in enumerate(pairwise(edges))
            if end > start
        ]
        return shuffled(batches, rng)

    def count(self, rows: int) -> int | None:
        return None


def build_policy(batching: Batching, *, batch_size: int, max_tokens: int | None = None) -> Policy:
    """Return the policy of a batching section that is not auto.

    Args:
        batching: The batching section.
        batch_size: Rows per batch; sequences per batch for pack.
        max_tokens: Default if the section sets none: tokens per batch for token_budget, per sequence for pack.
    """
    return POLICIES[batching.type](batching, batch_size, max_tokens)


def fixed_policy(batching: FixedBatching, batch_size: int, max_tokens: int | None) -> Policy:
    return Fixed(batch_size, shuffle_rows=batching.shuffle, drop_last=batching.drop_last)


def bucket_policy(batching: BucketBatching, batch_size: int, max_tokens: int | None) -> Policy:
    return Bucket(
        batch_size,
        window=whole_batches(batching.window, batch_size),
        noise=batching.noise,
        length_spread=batching.length_spread,
        drop_last=batching.drop_last,
        longest_first=batching.longest_first,
    )


def token_budget_policy(batching: TokenBudgetBatching, batch_size: int, max_tokens: int | None) -> Policy:
    written = batching.max_tokens
    budget = max_tokens if written == "auto" else written
    if budget is None:
        raise AssertionError("data.batching.max_tokens was not resolved")
    return TokenBudget(
        budget,
        window=batching.window,
        max_rows=batching.max_rows,
        multiple_of=batching.multiple_of,
        noise=batching.noise,
        longest_first=batching.longest_first,
    )


def pack_policy(batching: PackBatching, batch_size: int, max_tokens: int | None) -> Policy:
    sequence = batching.max_tokens or max_tokens
    if sequence is None:
        raise AssertionError("data.batching.max_tokens was not resolved")
    return Pack(sequence, sequences=batch_size, window=batching.window)


def chunk_policy(batching: ChunkBatching, batch_size: int, max_tokens: int | None) -> Policy:
    return Fixed(batch_size, shuffle_rows=batching.shuffle, rows_together=batching.window)


def auto_policy(batching: AutoBatching, batch_size: int, max_tokens: int | None) -> Policy:
    raise AssertionError("batching: auto has to be resolved before a plan is made")


POLICIES: dict[str, Callable[..., Policy]] = {
    "auto": auto_policy,
    "fixed": fixed_policy,
    "bucket": bucket_policy,
    "token_budget": token_budget_policy,
    "pack": pack_policy,
    "chunk": chunk_policy,
}


def whole_batches(window: int, batch_size: int) -> int:
    """Return the window rounded up to a multiple of the batch size."""
    return -(-window // batch_size) * batch_size


def refuse_longer(lengths: np.ndarray, max_row_tokens: int | None, *, name: Callable[[int], str] | None = None) -> None:
    """Raise DataError if a row is longer than a batch or sequence may be; `name` returns a row's key by index."""
    if max_row_tokens is None or int(lengths.max(initial=0)) <= max_row_tokens:
        return
    index = int(lengths.argmax())
    row = f"row {name(index)}" if name is not None else "a row"
    count = int((lengths > max_row_tokens).sum())
    others = f" ({count:,} rows are longer)" if count > 1 else ""
    raise DataError(
        f"{row} has {int(lengths[index]):,} tokens, more than the {max_row_tokens:,} of data.batching.max_tokens"
        f"{others}; write at least {int(lengths[index])} there, or preprocessing.global_max_sequence_length: "
        f"{max_row_tokens}"
    )


def sorted_order(lengths: np.ndarray, *, noise: float, rng: np.random.Generator) -> np.ndarray:
    """Return indices in ascending order of length, each varied by up to a share of `noise`; ties keep their order."""
    if noise:
        lengths = lengths * (1 + noise * rng.uniform(-1, 1, len(lengths)))
    return np.argsort(lengths, kind="stable")


def even_cuts(rows: int, size: int) -> list[int]:
    """Return the ends of batches of `size` rows."""
    return [*range(size, rows, size), rows] if rows else []


def spread_cuts(lengths: np.ndarray, *, size: int, spread: int) -> list[int]:
    """Return the ends of batches of at most `size` rows whose lengths differ by at most `spread`."""
    cuts, start = list[int](), 0
    while start < len(lengths):
        ahead = lengths[start : start + size]
        apart = np.maximum.accumulate(ahead) - np.minimum.accumulate(ahead)
        start += int(np.searchsorted(apart, spread, side="right"))
        cuts.append(start)
    return cuts


def budget_cuts(lengths: np.ndarray, *, budget: int, rows: int | None, multiple_of: int) -> list[int]:
    """Return the ends of batches that are as large as `budget` allows.

    Args:
        lengths: Tokens of each row, in the order of the batches.
        budget: Maximum of the number of rows times the longest row.
        rows: Maximum number of rows; None for no limit.
        multiple_of: Round the number of rows down to a multiple of this, unless the batch is smaller.
    """
    cuts, start = list[int](), 0
    while start < len(lengths):
        most = budget // max(1, int(lengths[start]))
        ahead = np.maximum.accumulate(lengths[start : start + (most if rows is None else min(most, rows))])
        if ahead[-1] > ahead[0]:  # only if noise has put a longer row after a shorter one
            count = int(np.searchsorted(ahead * np.arange(1, len(ahead) + 1), budget, side="right"))
        else:
            count = len(ahead)
        start += count - count % multiple_of if count > multiple_of else count
        cuts.append(start)
    return cuts


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence of each row, [n], and the number of tokens in each sequence, [sequences]."""
    sequence_n = np.empty(len(lengths), dtype=np.int64)
    open_sequences: list[int] = []
    """Room and index of each sequence that is not full, as one integer, ascending."""
    width, free = len(lengths) + 1, list[int]()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        position = bisect_left(open_sequences, length * width)
        if position < len(open_sequences):
            sequence = open_sequences.pop(position) % width
        else:
            sequence = len(free)
            free.append(capacity)
        free[sequence] -= length
        sequence_n[index] = sequence
        if free[sequence]:
            insort(open_sequences, free[sequence] * width + sequence)
    return sequence_n, capacity - np.array(free, dtype=np.int64)


def batches_at(order: np.ndarray, cuts: list[int], *, fullest: int = 0) -> list[PlannedBatch]:
    """Return the indices cut at `cuts`; batches of fewer rows than `fullest` are dropped."""
    batches = [alone(order[start:end]) for start, end in pairwise([0, *cuts])]
    return [batch for batch in batches if len(batch.rows) >= fullest]


def shuffled(batches: list[PlannedBatch], rng: np.random.Generator) -> list[PlannedBatch]:
    """Return the batches in random order."""
    return [batches[index] for index in rng.permutation(len(batches))]


def longest_to_front(batches: list[PlannedBatch], lengths: np.ndarray) -> list[PlannedBatch]:
    """Return the batches with the one that holds the longest row first; `lengths` are those of the indexed rows."""
    if not batches:
        return batches
    first = max(range(len(batches)), key=lambda index: int(lengths[batches[index].rows].max()))
    return [batches[first], *batches[:first], *batches[first + 1 :]]
