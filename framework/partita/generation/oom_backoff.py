"""Split batches in two when memory runs out.

A batch runs whole, or in halves, quarters and so on, in order, as large as the limit allows: the split is a function
of the rows' lengths and the limit alone. After a failure, the limit drops to half of the failed batch. It is a limit
for rows of that length; shorter rows may be more, so that a few long rows do not slow down a job. A single row that
does not fit says nothing about the others: after it, the limit ignores failures of batches that contained it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from partita_trainers.batch_size.device_errors import is_too_large

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class BatchBudget:
    """How many rows a job may put on the device at once. Jobs that share a budget share its reductions."""

    batch_size: int
    """Planned rows of a batch: slots with continuous batching, requests in flight with a server."""
    token_budget: int | None = None
    """Total tokens of rows that fit, if memory and not speed determined the batch size; allows more short rows."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the device raises an error before the system kills the process."""
    current_limit: int = 0
    """Most rows in one forward pass, for rows of `limit_tokens` tokens; starts at `batch_size`."""
    limit_tokens: int | None = None
    """Length of the longest row in the batch that did not fit; None if all have fitted."""
    out_of_memory: int = 0
    """How often a batch did not fit."""
    max_rows: int = 0
    """Most rows in one forward pass, for rows of any length; starts at `current_limit`."""

    def __post_init__(self) -> None:
        self.current_limit = self.current_limit or self.batch_size
        self.max_rows = self.max_rows or self.current_limit

    def limit_at(self, tokens: int) -> int:
        """Return the most rows of this length: as many tokens in total as `current_limit` of `limit_tokens` tokens."""
        if self.limit_tokens is None:
            return self.current_limit
        return min(self.max_rows, max(1, self.current_limit * self.limit_tokens // max(1, tokens)))


@dataclass(frozen=True)
class BatchPart(Generic[T]):
    """A finished part of a batch: its result, or the failure of a single row that does not fit."""

    indices: range
    """Indices of its rows in the batch."""
    result: T | None
    failure: Exception | None = None
    """The device's error for a single row that does not fit."""


def halves(indices: range) -> tuple[range, range]:
    """Split at least two indices into halves; the first one is the larger."""
    middle = (len(indices) + 1) // 2
    return indices[:middle], indices[middle:]


def run_with_oom_backoff(
    rows: int,
    work: Callable[[range], tuple[T | None, Exception | None]],
    *,
    budget: BatchBudget,
    tokens: Callable[[range], int],
    describe: Callable[[range], str],
) -> Iterator[BatchPart[T]]:
    """Run a batch of `rows` rows, split where necessary, and yield the finished parts in order.

    Args:
        rows: Number of rows in the batch.
        work: Runs a part. It returns the result, or the failure if the part did not fit, and then both halves are
            run; or neither if no row of the part is requested, and then the part is skipped.
        budget: Limits the rows of a part; lowered when memory runs out.
        tokens: Returns the length of a part's longest row, including new tokens.
        describe: Names a part in the log, such as "64 rows of 461 prompt tokens".
    """
    before, failed = (budget.current_limit, budget.limit_tokens), list[range]()
    waiting = [range(rows)] if rows else []
    while waiting:
        indices = waiting.pop()
        if len(indices) > max(1, budget.limit_at(tokens(indices))):
            waiting += reversed(halves(indices))
            continue
        result, failure = work(indices)
        budget.out_of_memory += failure is not None
        if result is not None:
            yield BatchPart(indices, result)
        elif failure is not None and len(indices) > 1:
            failed.append(indices)
            budget.current_limit, budget.limit_tokens = len(halves(indices)[0]), tokens(indices)
            waiting.append(indices)
            why = "too large for the device:" if is_too_large(failure) else "out of memory with"
            logger.warning("%s %s: continuing with %s", why, describe(indices), f"{budget.current_limit:,}")
            logger.debug("device error: %s", failure)
        else:
            # Parts that contained this row may have failed because of it.
            failed = [other for other in failed if indices[0] not in other]
            budget.current_limit, budget.limit_tokens = (
                (len(halves(failed[-1])[0]), tokens(failed[-1])) if failed else before
            )
            if failure is not None:
                yield BatchPart(indices, None, failure)
