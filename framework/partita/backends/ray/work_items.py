"""Work items: rows with their prompts, in the same order as in a single process.

An item is one row with continuous batching, with all its samples, and a whole batch with static batching.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from partita.generation.requests import RowRequests, RowResult, Rows, common_prefix, plan
from partita.generation.static_batches import plan_samples
from partita.lm.base import BatchSupport


@dataclass(frozen=True)
class WorkItem:
    """Rows that are answered together, each with its prompt."""

    index: int
    """Index of the item in the plan."""
    rows: tuple[int, ...]
    """Row indices in the dataset."""
    prompts: tuple[list[int], ...]
    """Prompt tokens of each row; one list for all samples of a row, which is sent once."""
    new_tokens: tuple[int, ...]
    """Limit of generated tokens of each row."""
    keys: tuple[bytes, ...]
    """Sampling key of each row."""
    wanted: tuple[bool, ...]
    """Which rows are requested; the others only keep the batch as planned."""


class WorkPlan(Protocol):
    """All work items of a job by index."""

    @property
    def total(self) -> int:
        """Number of items."""

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens that all prompts begin with; computed once."""

    def work_items(self, indices: Sequence[int]) -> list[WorkItem]:
        """Return the items at these indices, without rows that are answered."""

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """Return the index of the item that a result completes, if any, and the result with those derived from it."""


class RowWorkPlan:
    """One row per item, the longest prompt first. The samples of a row share an item, and so do rows of equal prompts.

    An item that is assigned again has only the samples that are missing.
    """

    def __init__(self, work: RowRequests, left: npt.NDArray[np.bool_]) -> None:
        """Plan the rows to answer, those with True in `left`, [rows]; of samples all or none."""
        self.work, self.left = work, left.copy()
        self.order, self.copies = plan(work, left)
        self.prefix = common_prefix(work, self.order)
        self.index_of_row: dict[int, int] = {}
        """Item index of each assigned row without a result."""

    @property
    def total(self) -> int:
        """Number of items."""
        return len(self.order) // self.work.num_samples

    def rows_of(self, index: int) -> list[int]:
        """Return the rows of an item without a result."""
        num_samples = self.work.num_samples
        return [row for row in self.order[index * num_samples : (index + 1) * num_samples] if self.left[row]]

    def work_items(self, indices: Sequence[int]) -> list[WorkItem]:
        """Return the items at these indices."""
        work, rows_of_items = self.work, [self.rows_of(index) for index in indices]
        prompts = work.fetch([rows[0] for rows in rows_of_items])
        self.index_of_row |= {row: index for rows, index in zip(rows_of_items, indices, strict=True) for row in rows}
        return [
            WorkItem(
                index,
                tuple(rows),
                (ids,) * len(rows),
                tuple(work.new_tokens[rows].tolist()),
                tuple(map(work.key, rows)),
                (True,) * len(rows),
            )
            for index, rows, ids in zip(indices, rows_of_items, prompts, strict=True)
        ]

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """Return the item index if that completes the item, and the result with those of rows of the same prompt."""
        index = self.index_of_row.pop(result.row)
        self.left[result.row] = False
        copies = [RowResult(row, result.generated, result.error) for row in self.copies.get(result.row, ())]
        return None if self.rows_of(index) else index, [result, *copies]


class BatchWorkPlan:
    """One batch of the static engine per item."""

    prefix: Sequence[int] = ()

    def __init__(
        self, work: RowRequests, left: npt.NDArray[np.bool_], *, batch_size: int, support: BatchSupport
    ) -> None:
        """Plan the batches.

        Args:
            work: The rows with their prompts.
            left: Rows to answer, [rows]; the others stay in the batches.
            batch_size: Rows of a batch.
            support: Which rows can be generated together.
        """
        self.work = work
        self.left = left.copy()
        groups = plan_samples(work.lengths.astype(np.int32), work.num_samples, batch_size=batch_size, support=support)
        batches = [rows for group in groups for rows in group]
        self.positions = [position for position, rows in enumerate(batches) if self.left[rows].any()]
        self.batches: list[Rows] = [batches[position] for position in self.positions]
        self.index_of_row: dict[int, int] = {}
        """Item index of each assigned row without a result."""

    @property
    def total(self) -> int:
        """Number of items."""
        return len(self.batches)

    def work_items(self, indices: Sequence[int]) -> list[WorkItem]:
        """Return the batches at these indices."""
        return [self.work_item(index) for index in indices]

    def work_item(self, index: int) -> WorkItem:
        """Return a whole batch, named by its position among all batches."""
        rows = self.batches[index].tolist()
        wanted = self.left[rows].tolist()
        self.index_of_row |= {row: index for row, is_wanted in zip(rows, wanted, strict=True) if is_wanted}
        return WorkItem(
            self.positions[index],
            tuple(rows),
            tuple(self.work.fetch(rows)),
            tuple(self.work.new_tokens[rows].tolist()),
            tuple(map(self.work.key, rows)),
            tuple(wanted),
        )

    def answered(self, result: RowResult) -> tuple[int | None, list[RowResult]]:
        """Return the result, and the index of its batch if that is now complete."""
        index = self.index_of_row.pop(result.row)
        self.left[result.row] = False
        return None if self.left[self.batches[index]].any() else index, [result]
