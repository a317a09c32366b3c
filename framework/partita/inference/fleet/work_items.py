"""What workers are handed: rows with their prompts, in the order of a plan that is the same as in one process.

A place of the plan is a row where answers are made in slots, and a whole batch where they are made in sorted batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partita.inference.results import RowResult, Rows
from partita.inference.scheduler import RowRequests, common_prefix, plan
from partita.inference.static_batches import plan_batches
from partita.lm.base import BatchWay


@dataclass(frozen=True)
class WorkItem:
    """Rows that are answered together, each with its prompt."""

    place: int
    """Place in the plan."""
    rows: tuple[int, ...]
    """Places in the data."""
    prompts: tuple[list[int], ...]
    """Tokens of each row's prompt."""
    new_tokens: tuple[int, ...]
    """Most new tokens of each row."""
    keys: tuple[bytes, ...]
    """What each row's random numbers follow from."""
    max_new_tokens: tuple[bool, ...]
    """Rows that are asked for; the others only decide what those become."""


class WorkPlan(Protocol):
    """All parcels of a job, by their place."""

    @property
    def total(self) -> int:
        """Number of places."""

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens that all prompts begin with and that are read once."""

    def parcels(self, places: Sequence[int]) -> list[WorkItem]:
        """The parcels at these places, with what is not answered of them."""

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """A worker's result and those that follow from it; and the place that is answered with it, if any is."""


class RowWorkPlan:
    """A row a place, the longest prompt first; rows with equal prompts are one."""

    def __init__(self, work: RowRequests, left: npt.NDArray[np.bool_]) -> None:
        """`left` [rows] tells which rows are to be answered."""
        self.work = work
        self.order, self.copies = plan(work, left)
        self.prefix = common_prefix(work, self.order)
        self.places: dict[int, int] = {}
        """Of rows that were handed out and are not answered."""

    @property
    def total(self) -> int:
        """Number of places."""
        return len(self.order)

    def parcels(self, places: Sequence[int]) -> list[WorkItem]:
        """The parcels at these places."""
        rows = [self.order[place] for place in places]
        self.places |= zip(rows, places, strict=True)
        return [
            WorkItem(place, (row,), (ids,), (int(self.work.new_tokens[row]),), (self.work.key(row),), (True,))
            for place, row, ids in zip(places, rows, self.work.fetch(rows), strict=True)
        ]

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """The result, with those of rows that have the same prompt, and its place."""
        copies = [RowResult(row, result.generated, result.error) for row in self.copies.get(result.row, ())]
        return self.places.pop(result.row), [result, *copies]


class BatchWorkPlan:
    """A batch a place: those of the static engine."""

    prefix: Sequence[int] = ()

    def __init__(self, work: RowRequests, left: npt.NDArray[np.bool_], *, batch_size: int, way: BatchWay) -> None:
        """`left` [rows] tells which rows are to be answered; the others are still in the batches."""
        self.work = work
        self.left = left.copy()
        batches = plan_batches(work.lengths.astype(np.int32), batch_size=batch_size, way=way)
        self.positions = [position for position, rows in enumerate(batches) if self.left[rows].any()]
        self.batches: list[Rows] = [batches[position] for position in self.positions]
        self.places: dict[int, int] = {}
        """Of rows that were handed out and are not answered."""

    @property
    def total(self) -> int:
        """Number of places."""
        return len(self.batches)

    def parcels(self, places: Sequence[int]) -> list[WorkItem]:
        """The batches at these places."""
        return [self.parcel(place) for place in places]

    def parcel(self, place: int) -> WorkItem:
        """A whole batch, named by its position among all."""
        rows = self.batches[place].tolist()
        wanted = self.left[rows].tolist()
        self.places |= {row: place for row, asked in zip(rows, wanted, strict=True) if asked}
        return WorkItem(
            self.positions[place],
            tuple(rows),
            tuple(self.work.fetch(rows)),
            tuple(self.work.new_tokens[rows].tolist()),
            tuple(map(self.work.key, rows)),
            tuple(wanted),
        )

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """The result; and its batch, where that is complete with it."""
        place = self.places.pop(result.row)
        self.left[result.row] = False
        return None if self.left[self.batches[place]].any() else place, [result]
