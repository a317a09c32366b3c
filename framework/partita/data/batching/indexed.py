"""Plan batches of rows with known lengths: a pure function of lengths, policy, seed and epoch.

An epoch is an order of rows, a permutation unless another order is passed, divided into windows. A policy cuts each
window into batches. Windows are planned when they are reached, so that resuming costs one permutation and one window at
any position. A step is M consecutive batches and may span windows; the last step of an epoch is filled up with batches
without rows.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from partita.data.batching.plan import NOTHING, PlannedBatch
from partita.data.batching.policies import Policy, longest_to_front, refuse_longer
from partita_schema.common.text import counted
from partita_schema.errors import DataError, ResumeError

PLANNER_VERSION = 3
"""Increased whenever a change puts rows into other batches."""

Order = Callable[[int, np.random.Generator], np.ndarray]
"""order(epoch, rng): row indices of an epoch, int64, in the order in which windows are cut from them."""


class PlannedStep(NamedTuple):
    """The batches of a step, and the position after it."""

    batches: list[PlannedBatch]
    """M batches; some at the end of an epoch have no rows."""
    epoch: int
    """Epoch of the next step."""
    step: int
    """Index of the next step in its epoch."""
    window: int
    """Window in which the next step starts."""
    taken: int
    """Number of batches of that window that are used."""
    passed: float
    """Number of completed epochs, with the fraction of the current one."""


class IndexedPlanner:
    """Plan epochs over rows with known lengths; every row of an order is in exactly one batch of its epoch.

    Only `drop_last` removes rows.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        policy: Policy,
        batches_per_step: int,
        seed: int,
        order: Order | None = None,
        name: Callable[[int], str] | None = None,
    ) -> None:
        """Plan rows with these lengths.

        Args:
            lengths: Tokens of each row, [rows].
            policy: Cuts windows into batches.
            batches_per_step: M, the number of batches in one optimizer step.
            seed: Decides the order of the rows.
            order: Order of the rows in an epoch, instead of a permutation.
            name: Returns a row's key by index, for messages.

        Raises:
            DataError: If a row is longer than the policy can plan.
        """
        refuse_longer(lengths, policy.max_row_tokens, name=name)
        self.policy = policy
        self.batches_per_step = batches_per_step
        self._lengths = lengths
        self._seed = seed
        self._order = order
        self._counts: dict[int, int] = {}
        # The position is checked, or batches are counted, right before the plan.
        self._windows = lru_cache(maxsize=1)(self._make_windows)
        self._batches = lru_cache(maxsize=1)(self._cut)

    @property
    def num_rows(self) -> int:
        """Number of rows in the first epoch."""
        return len(self._lengths) if self._order is None else len(self._windows(0).order)

    def count_batches(self, epoch: int) -> int:
        """Return the number of batches with rows in an epoch. If it depends on lengths, all windows are planned once.

        Raises:
            DataError: If there are none.
        """
        if epoch not in self._counts:
            rows = len(self._lengths) if self._order is None else len(self._windows(epoch).order)
            count = self.policy.count(rows)
            if count is None:
                windows = self._windows(epoch)
                count = sum(len(self._cut(epoch, window)) for window in range(windows.number))
            if not count:
                raise DataError(
                    f"no batch of {counted(rows, 'row')} is full, so that all are left out; remove "
                    "data.batching.drop_last or write a smaller trainer.batch_size"
                )
            self._counts[epoch] = count
        return self._counts[epoch]

    def count_steps(self, epoch: int) -> int:
        """Return the number of steps in an epoch."""
        return -(-self.count_batches(epoch) // self.batches_per_step)

    def check(self, epoch: int, window: int, taken: int, step: int) -> None:
        """Raise ResumeError if an epoch has no such position.

        Args:
            epoch: The epoch.
            window: Window in which the next step starts.
            taken: Number of batches of that window that are used.
            step: Number of completed steps.
        """
        windows = self._windows(epoch)
        begins = window == taken == 0
        inside = window < windows.number and (taken == 0 or taken < len(self._batches(epoch, window)))
        if not inside or begins != (step == 0):
            raise ResumeError(
                f"the data position is step {step} at batch {taken} of window {window}, and epoch {epoch} of "
                f"{windows.number:,} windows has no such position; continue from an older checkpoint"
            )

    def steps(self, epoch: int, window: int = 0, taken: int = 0, step: int = 0) -> Iterator[PlannedStep]:
        """Yield the steps of an epoch from a position on.

        Args:
            epoch: The epoch.
            window: Window in which the next step starts.
            taken: Number of batches of that window that are used.
            step: Number of completed steps.

        Raises:
            DataError: If the epoch has no batches.
        """
        rows = len(self._windows(epoch).order)
        batches: list[PlannedBatch] = []
        ahead = self._from(epoch, window, taken)
        following = next(ahead, None)
        if following is None:
            self.count_batches(epoch)
        while following is not None:
            (batch, window, taken, used), following = following, next(ahead, None)
            batches.append(batch)
            if following is None:
                batches += [NOTHING] * (self.batches_per_step - len(batches))
                yield PlannedStep(batches, epoch + 1, 0, 0, 0, float(epoch + 1))
            elif len(batches) == self.batches_per_step:
                step += 1
                yield PlannedStep(batches, epoch, step, window, taken, epoch + used / rows)
                batches = []

    def _from(self, epoch: int, window: int, taken: int) -> Iterator[tuple[PlannedBatch, int, int, int]]:
        """Yield batches from a position on, each with the window, the batches taken and the rows used after it."""
        windows = self._windows(epoch)
        for number in range(window, windows.number):
            batches = self._batches(epoch, number)
            before = taken if number == window else 0
            used = windows.rows_before(number) + sum(len(batch.rows) for batch in batches[:before])
            for num_taken, batch in enumerate(batches[before:], start=before + 1):
                used += len(batch.rows)
                yield (batch, number + 1, 0, used) if num_taken == len(batches) else (batch, number, num_taken, used)

    def _cut(self, epoch: int, window: int) -> list[PlannedBatch]:
        """Return the batches of a window."""
        rows = self._windows(epoch).rows(window)
        lengths = self._lengths[rows]
        batches = self.policy.cut(lengths, self._rng(epoch, window + 1))
        if window == 0 and self.policy.longest_first:
            batches = longest_to_front(batches, lengths)
        return [PlannedBatch(rows[batch.rows], batch.sequences) for batch in batches]

    def _make_windows(self, epoch: int) -> "Windows":
        rng = self._rng(epoch)
        if self._order is not None:
            order = self._order(epoch, rng)
        elif self.policy.shuffle_rows:
            order = rng.permutation(len(self._lengths))
        else:
            order = np.arange(len(self._lengths))
        first = 0
        if self.policy.longest_first and len(order):
            first = int(self._lengths[order].argmax()) // self.policy.window
        return Windows(order, self.policy.window, first)

    def _rng(self, epoch: int, window: int = 0) -> np.random.Generator:
        """Return the random generator of an epoch's order (window 0), or of the batches of a window (from 1)."""
        return np.random.default_rng([self._seed, epoch, window])


class Windows(NamedTuple):
    """The order of an epoch, cut every `size` rows; one of the windows is moved to the front."""

    order: np.ndarray
    size: int
    first: int
    """Index of the window that is moved to the front."""

    @property
    def number(self) -> int:
        """Number of windows."""
        return -(-len(self.order) // self.size)

    def rows(self, window: int) -> np.ndarray:
        """Return the row indices of a window, counting windows in the order of use."""
        index = self.first if window == 0 else window - (window <= self.first)
        return self.order[index * self.size : (index + 1) * self.size]

    def rows_before(self, window: int) -> int:
        """Return the number of rows in the windows that are used before."""
        if window == 0:
            return 0
        missing = self.number * self.size - len(self.order) if self.first == self.number - 1 else 0
        return min(len(self.order), window * self.size - missing)
