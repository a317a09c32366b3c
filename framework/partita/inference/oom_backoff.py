"""Batches that are cut in two where memory runs out.

A batch is worked on whole, or else in its halves, quarters and so on, in order, as large as the limit lets them be: how
it is cut is a function of its rows' lengths and of the limit alone. The limit falls to half a batch that did not fit.
It is one of rows of that length; of shorter ones there may be more, so that a few long rows do not slow down a job. A
row that does not fit alone says nothing about the others: what failed together with it no longer counts then, and the
limit is again what it was.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

from partita_trainers.batch_size.memory import is_too_large

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class BatchLimit:
    """Most rows that go through the model at once. Jobs that share one begin where it stands."""

    rows: int
    """The limit now, for rows of `tokens`."""
    out_of_memory: int = 0
    """How often a batch did not fit."""
    tokens: int | None = None
    """Length of the longest row of the batch that did not fit; None where all have fitted."""
    most: int = 0
    """The limit for rows of any length; 0 for `rows` as they are at first."""

    def __post_init__(self) -> None:
        self.most = self.most or self.rows

    def at(self, tokens: int) -> int:
        """Most rows of this length: as many tokens in all as `rows` of `tokens` are."""
        if self.tokens is None:
            return self.rows
        return min(self.most, max(1, self.rows * self.tokens // max(1, tokens)))


@dataclass(frozen=True)
class Capacity:
    """What a job may put on the device at once."""

    rows: int
    """Rows that its batches are planned with."""
    limit: BatchLimit
    """Cuts them."""
    room_tokens: int | None = None
    """Tokens of rows that memory holds in all, where it decided the number of rows and not their speed."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context for the work, in which a device says that it is full before the system ends the process."""


@dataclass(frozen=True)
class BatchPart(Generic[T]):
    """A part of a batch that is finished: with its result, or a single row that does not fit."""

    places: range
    """Which rows of the batch."""
    result: T | None
    failure: Exception | None = None
    """What the device said of a single row that does not fit."""


def halves(places: range) -> tuple[range, range]:
    """The two halves of at least two places; the first is the larger one."""
    middle = (len(places) + 1) // 2
    return places[:middle], places[middle:]


def run_with_oom_backoff(
    rows: int,
    work: Callable[[range], tuple[T | None, Exception | None]],
    *,
    limit: BatchLimit,
    tokens: Callable[[range], int],
    describe: Callable[[range], str],
) -> Iterator[BatchPart[T]]:
    """Parts of a batch of `rows`, in order, every row in one of them at most.

    `work` does a part and gives its result, or the failure where the part did not fit, and then both halves of the part
    are worked on; or neither where nothing of the part is asked for, which is then left out. `tokens` tells the
    length of a part's longest row, new tokens included, and `describe` names a part in the log, such as "64 rows of 461
    prompt tokens".
    """
    before, failed = (limit.rows, limit.tokens), list[range]()
    waiting = [range(rows)] if rows else []
    while waiting:
        places = waiting.pop()
        if len(places) > max(1, limit.at(tokens(places))):
            waiting += reversed(halves(places))
            continue
        result, failure = work(places)
        limit.out_of_memory += failure is not None
        if result is not None:
            yield BatchPart(places, result)
        elif failure is not None and len(places) > 1:
            failed.append(places)
            limit.rows, limit.tokens = len(halves(places)[0]), tokens(places)
            waiting.append(places)
            why = "too large for the device:" if is_too_large(failure) else "out of memory with"
            logger.warning("%s %s: going on with %s", why, describe(places), f"{limit.rows:,}")
            logger.debug("the device said: %s", failure)
        else:
            # What failed together with these rows may have failed because of them.
            failed = [other for other in failed if places[0] not in other]
            limit.rows, limit.tokens = (len(halves(failed[-1])[0]), tokens(failed[-1])) if failed else before
            if failure is not None:
                yield BatchPart(places, None, failure)
