"""Which rows go into which batch: a pure function of lengths, settings, seed and epoch.

An epoch is a permutation of all rows, seen through windows. A policy says how the rows of a window are ordered and cut
into batches, and whether its batches are shuffled; windows are planned when they are reached, so that resuming costs
one permutation and one window wherever the position is. A step is M batches in a row; only the last step of an epoch
may hold fewer rows, in smaller and at its end empty batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from partita_schema.data import Batching, BucketBatching, FixedBatching

PLANNER_VERSION = 1
"""Changes with anything that puts rows into other batches."""
Plan = list[np.ndarray]
"""Batches, each an array of row numbers."""


class Policy(Protocol):
    """How the rows of a window become batches."""

    @property
    def shuffle_rows(self) -> bool:
        """Whether an epoch begins with a permutation."""

    @property
    def shuffle_batches(self) -> bool:
        """Whether the batches of a window change places."""

    @property
    def window(self) -> int:
        """Rows that are planned together."""

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> Plan:
        """Batches of a window's rows."""


@dataclass(frozen=True)
class Fixed:
    """Rows as they come, cut every `batch_size` rows."""

    batch_size: int
    shuffle_rows: bool
    shuffle_batches: bool = False

    @property
    def window(self) -> int:
        return self.batch_size

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> Plan:
        return even_cuts(rows, self.batch_size)


@dataclass(frozen=True)
class Bucket:
    """Rows sorted by length, cut every `batch_size` rows; equally long rows stay in their shuffled order."""

    batch_size: int
    window: int
    shuffle_rows: bool = True
    shuffle_batches: bool = True

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> Plan:
        return even_cuts(rows[np.argsort(lengths[rows], kind="stable")], self.batch_size)


def even_cuts(rows: np.ndarray, size: int) -> Plan:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def fixed_policy(batching: FixedBatching, batch_size: int) -> Policy:
    return Fixed(batch_size, shuffle_rows=batching.shuffle)


def bucket_policy(batching: BucketBatching, batch_size: int) -> Policy:
    """The window is a multiple of the batch size, so that only the last window can hold a smaller batch."""
    return Bucket(batch_size, window=-(-batching.window // batch_size) * batch_size)


POLICIES: dict[str, Callable[..., Policy]] = {"fixed": fixed_policy, "bucket": bucket_policy}


class IndexedPlanner:
    """Plans epochs over rows whose lengths are known; every row is in exactly one batch of an epoch."""

    def __init__(
        self, lengths: np.ndarray, *, batching: Batching, batch_size: int, batches_per_step: int, seed: int
    ) -> None:
        """`lengths` are tokens, [rows]; `batches_per_step` is M."""
        self._lengths = lengths
        self._policy = POLICIES[batching.type](batching, batch_size)
        self._batch_size = batch_size
        self._batches_per_step = batches_per_step
        self._seed = seed

    @property
    def num_batches(self) -> int:
        """Batches of an epoch that hold rows."""
        return -(-len(self._lengths) // self._batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_batches // self._batches_per_step)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Plan]:
        """Steps of an epoch from number `start` on; each is M arrays of row numbers."""
        step: Plan = []
        for rows in self._batches(epoch, start * self._batches_per_step):
            step.append(rows)
            if len(step) == self._batches_per_step:
                yield step
                step = []
        if step:
            nothing = np.empty(0, dtype=np.int64)
            yield step + [nothing] * (self._batches_per_step - len(step))

    def _batches(self, epoch: int, start: int) -> Iterator[np.ndarray]:
        order = np.arange(len(self._lengths))
        if self._policy.shuffle_rows:
            order = self._chance(epoch).permutation(order)
        per_window = self._policy.window // self._batch_size
        for window in range(start // per_window, -(-self.num_batches // per_window)):
            first = window * self._policy.window
            batches = self._policy.cut(order[first : first + self._policy.window], self._lengths)
            if self._policy.shuffle_batches:
                batches = [batches[place] for place in self._chance(epoch, window + 1).permutation(len(batches))]
            yield from batches[max(0, start - window * per_window) :]

    def _chance(self, epoch: int, window: int = 0) -> np.random.Generator:
        """Randomness of an epoch's permutation (window 0), or of the batches of a window (from 1)."""
        return np.random.default_rng([self._seed, epoch, window])
