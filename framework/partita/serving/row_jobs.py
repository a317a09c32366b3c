"""Rows that are answered together between the steps of the engine: with scored labels, a head, or several answers.

All jobs that wait share batches, as rows of one dataset.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.generation.job import PredictionPipeline
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import generate_for_rows
from partita.generation.predictions import Answer
from partita.generation.prompts import PromptRows
from partita.generation.requests import stop_if_broken

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RowJob:
    """Rows that are answered together, between the steps."""

    rows: PromptRows
    on_end: Callable[[Sequence[Answer], Exception | None], None]
    """Receives the answers in the order of the rows, or the error, in the engine's thread."""
    cancelled: bool = False
    """Whether the client is gone; such a job is skipped if it has not begun."""


class RowJobs:
    """The jobs of an engine. Only `add` is called in other threads."""

    def __init__(self, pipeline: PredictionPipeline, budget: BatchBudget) -> None:
        """Answer rows with `pipeline`, at most as many at a time as the budget allows."""
        self.pipeline, self.budget = pipeline, budget
        self.waiting: deque[RowJob] = deque()
        """Jobs that have not begun, the oldest first."""
        self.running: list[RowJob] = []
        """Jobs that are being answered."""
        self.failed = 0
        """Number of jobs that ended with an error."""

    def add(self, job: RowJob) -> None:
        """Append a job to the queue."""
        self.waiting.append(job)

    def run(self) -> None:
        """Answer all jobs that wait. Raise JobError if the device has failed."""
        jobs = [self.waiting[index] for index in range(len(self.waiting))]
        # In this order, no other thread sees a job neither waiting nor running.
        self.running = [job for job in jobs if not job.cancelled]
        for _ in jobs:
            self.waiting.popleft()
        if self.running:
            self._answer(list(self.running))

    def _answer(self, jobs: Sequence[RowJob]) -> None:
        """Answer the rows of several jobs together; if that fails, those of each job separately."""
        if len(jobs) > 1 and self.pipeline.generation.do_sample and have_equal_keys(jobs):
            # Rows with equal keys would count as copies of one another, and their random numbers would differ.
            self._answer_separately(jobs)
            return
        rows = JoinedRows([job.rows for job in jobs])
        try:
            answers = {answer.row: answer for answer in generate_for_rows(self.pipeline, rows, budget=self.budget)}
        except Exception as error:
            stop_if_broken(error)
            if len(jobs) > 1:
                self._answer_separately(jobs)
            else:
                self._end(jobs[0], (), error)
            return
        for job, part in zip(jobs, rows.parts(), strict=True):
            self._end(job, [answers[row] for row in part], None)

    def _answer_separately(self, jobs: Sequence[RowJob]) -> None:
        for job in jobs:
            self._answer([job])

    def give_up(self, error: Exception) -> None:
        """End all jobs with an error."""
        jobs = [*self.running, *self.waiting]
        self.waiting.clear()
        for job in jobs:
            self._end(job, (), error)

    def _end(self, job: RowJob, answers: Sequence[Answer], error: Exception | None) -> None:
        """Send the end of a job."""
        self.failed += error is not None
        if job in self.running:
            self.running.remove(job)
        try:
            job.on_end(answers, error)
        except Exception:
            logger.exception("the receiver of rows failed")


class JoinedRows:
    """Rows one after the other; implements `PromptRows`."""

    def __init__(self, requests: Sequence[PromptRows]) -> None:
        """Join the rows of `requests`."""
        self._requests = requests
        self._ends = np.cumsum([len(rows) for rows in requests])
        self.columns = tuple(dict.fromkeys(column for rows in requests for column in rows.columns))
        """Column names."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def parts(self) -> list[range]:
        """Return the indices of the rows of each request."""
        starts = [0, *self._ends[:-1].tolist()]
        return [range(start, end) for start, end in zip(starts, self._ends.tolist(), strict=True)]

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows in the requested order."""
        found = (self._find(index) for index in indices)
        return [rows.get([index])[0] for rows, index in found]

    def key(self, index: int) -> str:
        """Return the name of a row."""
        rows, number = self._find(index)
        return rows.key(number)

    def sampling_key(self, index: int) -> str:
        """Return the key from which a row's random numbers are derived."""
        rows, number = self._find(index)
        return rows.sampling_key(number)

    def _find(self, index: int) -> tuple[PromptRows, int]:
        """Return the request of a row, and the row's index in it."""
        request = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[request - 1]) if request else 0
        return self._requests[request], index - start


def have_equal_keys(jobs: Sequence[RowJob]) -> bool:
    """Return whether rows of jobs have the same sampling key."""
    keys = [job.rows.sampling_key(row) for job in jobs for row in range(len(job.rows))]
    return len(set(keys)) < len(keys)
