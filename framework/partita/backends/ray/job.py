"""Generation with a pool of workers: this process assigns rows, longest first, and yields results as they arrive.

A worker is assigned enough rows to stay busy, and fewer towards the end, so that all workers finish together. When a
worker dies, its unanswered rows are assigned to others and a new worker replaces it: no row is lost or answered
twice. An error raised by a row is that row's error, as in a single process. Any other error of a worker ends the job.
"""

import heapq
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.backends.ray.messages import Event, WorkerEnded, WorkerJob, WorkerLost, WorkerReplied, WorkerReported
from partita.backends.ray.work_items import BatchWorkPlan, RowWorkPlan, WorkPlan
from partita.backends.ray.worker_pool import WorkerPool, WorkerState
from partita.generation.engine import Engine, batch_support_for, choose_engine
from partita.generation.prompts import Lengths
from partita.generation.requests import BatchResult, GenerationJob, RowResult
from partita.generation.scheduler import MAX_SLOT_FACTOR, PREFILL_DIVISOR
from partita.lm.base import AnswerContext, GenerationOptions

logger = logging.getLogger(__name__)


class Assignments:
    """Item indices from 0 to `total` - 1. Each is held by at most one worker, and answered once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.next_index = 0
        """Items before this index have been assigned at least once."""
        self.returned: list[int] = []
        """A heap of items returned by lost workers."""
        self.assigned: dict[Hashable, set[int]] = {}

    @property
    def left(self) -> int:
        """Number of unassigned items."""
        return self.total - self.next_index + len(self.returned)

    @property
    def done(self) -> bool:
        """Whether every item is answered."""
        return not self.left and not any(self.assigned.values())

    def holds(self, worker: Hashable) -> int:
        """Return the number of items that a worker holds."""
        return len(self.assigned.get(worker, ()))

    def assign(self, worker: Hashable, wanted: int) -> list[int]:
        """Assign the next items of the plan to a worker, at most `wanted`."""
        indices = [heapq.heappop(self.returned) for _ in range(min(wanted, len(self.returned)))]
        end = min(self.total, self.next_index + max(0, wanted - len(indices)))
        indices += range(self.next_index, end)
        self.next_index = end
        self.assigned.setdefault(worker, set()).update(indices)
        return indices

    def answer(self, worker: Hashable, index: int) -> None:
        """Mark an item that a worker holds as answered."""
        self.assigned[worker].remove(index)

    def requeue(self, worker: Hashable) -> int:
        """Return a worker's items to the queue, and their number."""
        indices = self.assigned.pop(worker, set())
        for index in indices:
            heapq.heappush(self.returned, index)
        return len(indices)


AHEAD = 2
"""Rows that a worker holds, as a multiple of those it generates at a time, so that it never waits."""


class WorkerPoolJob:
    """Runs the work items of a plan on a pool."""

    def __init__(self, pool: WorkerPool, plan: WorkPlan, worker_job: WorkerJob) -> None:
        """The pool must have started."""
        self.pool, self.plan, self.worker_job = pool, plan, worker_job
        self.assignments = Assignments(plan.total)
        self.in_slots = worker_job.engine == "slots"
        self.is_stopping = False

    def completions(self, stopping: Callable[[], bool]) -> Iterator[BatchResult]:
        """Yield results until all have arrived; once `stopping` returns True, only those of started rows."""
        pool = self.pool
        self.start_job(pool.ready())
        while not self.assignments.done:
            if stopping() and not self.is_stopping:
                self.is_stopping = True
                self.end(now=True)
            if self.is_stopping and not pool.working():
                return
            if not self.is_stopping:
                pool.fill()
            yield from self.next_results()
        self.end(now=False)
        while pool.working():
            yield from self.next_results()

    def next_results(self) -> Iterator[BatchResult]:
        """Yield the results that have arrived, and handle other events."""
        for event in self.pool.poll():
            batch = self.handle_event(event)
            if batch is not None:
                yield batch
        for worker in self.pool.working():
            if (self.assignments.holds(worker.number) or self.assignments.done) and self.pool.is_silent(worker):
                self.handle_loss(
                    worker, f"it has not answered for {self.pool.timeout:,.0f} s (backend.timeout_seconds)"
                )
        self.pool.check_timeouts()

    def handle_event(self, event: Event) -> BatchResult | None:
        """Handle an event. Return results if it holds any; assign work to workers that are ready."""
        pool = self.pool
        worker = pool.active_workers[event.worker]
        match event:
            case WorkerReported(report=BatchResult() as batch):
                return self.handle_batch(worker, batch)
            case WorkerEnded():
                worker.state = "ready"
            case WorkerLost(reason=reason):
                self.handle_loss(worker, reason)
            case _:
                pool.handle_event(event)
                if (
                    isinstance(event, WorkerReplied)
                    and event.method == "load"
                    and not (self.is_stopping or self.assignments.done)
                ):
                    self.start_job([worker])
        return None

    def handle_batch(self, worker: WorkerState, batch: BatchResult) -> BatchResult:
        """Return the results of a worker with those derived from them, and assign it new rows."""
        results: list[RowResult] = []
        for result in batch.results:
            index, answered = self.plan.answered(result)
            results += answered
            if index is not None:
                self.assignments.answer(worker.number, index)
        self.pool.deaths = 0
        # The slots opened for the last few rows do not show how many could be opened.
        hit_oom = batch.spent.out_of_memory > 0
        worker.batch_size = batch.batch_size if hit_oom else max(worker.batch_size, batch.batch_size)
        self.submit([worker])
        # Workers run at the same time, so the time of all of them is the mean.
        spent = batch.spent.with_mean_seconds(max(1, len(self.pool.working())))
        size = sum(other.batch_size for other in self.pool.active_workers.values())
        return BatchResult(tuple(results), spent, batch_size=size)

    def handle_loss(self, worker: WorkerState, reason: str) -> None:
        """Handle a lost worker: its rows are assigned to others."""
        rows = self.assignments.requeue(worker.number)
        self.pool.handle_loss(worker, reason, rows=rows)
        self.submit(self.pool.working())

    def start_job(self, workers: Sequence[WorkerState]) -> None:
        """Start the job on workers, with as many rows as they generate at a time."""
        for worker in workers:
            worker.state, worker.heard, worker.batch_size = "working", time.monotonic(), 0
            self.pool.worker_backend.start_job(worker.number, self.worker_job)
        most = min(self.batch_size(workers[0]), self.share(1)) if workers else 0
        # The longest rows are assigned round-robin, so that all workers get some.
        by_worker: dict[int, list[int]] = {worker.number: [] for worker in workers}
        for _ in range(most):
            for worker in workers:
                by_worker[worker.number] += self.assignments.assign(worker.number, 1)
        for number, indices in by_worker.items():
            self.send(number, indices)
        self.submit(workers)

    def submit(self, workers: Sequence[WorkerState]) -> None:
        """Assign rows to workers that will soon have free slots; fewer towards the end, so that all finish together."""
        for worker in workers:
            batch_size = self.batch_size(worker)
            # Where memory is the limit, there may be more slots for shorter rows.
            ahead = MAX_SLOT_FACTOR if self.worker_job.token_budget is not None and self.in_slots else AHEAD
            wanted = ahead * batch_size - self.assignments.holds(worker.number)
            if self.is_stopping or wanted * PREFILL_DIVISOR < batch_size:
                continue
            share = self.share(2 if self.assignments.holds(worker.number) else 1)
            self.send(worker.number, self.assignments.assign(worker.number, min(wanted, share)))

    def share(self, parts: int) -> int:
        """Return the unassigned items divided by `parts` per worker; all of them for a single worker."""
        workers = self.pool.workers
        return -(-self.assignments.left // (parts * workers)) if workers > 1 else self.assignments.left

    def batch_size(self, worker: WorkerState) -> int:
        """Return the number of items that a worker processes at a time."""
        rows = max(self.worker_job.batch_size, worker.batch_size)
        return -(-rows // self.worker_job.num_samples) if self.in_slots else 1

    def send(self, number: int, indices: list[int]) -> None:
        """Send a worker the items at these indices."""
        if indices:
            self.pool.active_workers[number].heard = time.monotonic()
            self.pool.worker_backend.submit(number, self.worker_job.number, self.plan.work_items(indices))

    def end(self, *, now: bool) -> None:
        """Tell workers that no more rows follow; with `now`, also to skip rows not yet started."""
        for worker in self.pool.working():
            worker.heard = time.monotonic()
            self.pool.worker_backend.end(worker.number, self.worker_job.number, now=now)


class PoolGenerator:
    """Generates with the model of a worker pool: a `partita.generation.generator.Generator`."""

    def __init__(self, pool: WorkerPool, *, is_limited: bool = True) -> None:
        """Use a pool; with `is_limited`, prompts must fit the context of its model."""
        self.pool, self._is_limited = pool, is_limited
        self.job_number = 0
        """Number of jobs so far."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens; None if prompts may be longer than the context."""
        return self.pool.context_length if self._is_limited else None

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""
        return self.pool.answer_context

    @property
    def tokenizer(self) -> Any:
        """Tokenizes the prompts in this process."""
        return self.pool.tokenizer

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; the same as in a single process on such a device."""
        return self.pool.fingerprint

    def choose_engine(self, lengths: Lengths, *, options: GenerationOptions, max_new_tokens: int) -> Engine:
        """Return the engine for prompts of these lengths, [rows], in tokens."""
        return choose_engine(self.pool, lengths, options=options, max_new_tokens=max_new_tokens)

    def generate(self, job: GenerationJob, *, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        """Generate answers for all rows that are not `done`, [rows], and yield them as they arrive.

        Everything yielded is complete.

        Raises:
            JobError: Workers died consecutively without a result.
            Exception: Any error that a worker raised outside of a row.
        """
        pool, settings = self.pool, job.settings
        work = job.requests(context_length=self.context_length, answers=self.answer_context)
        plan: WorkPlan
        if job.engine == "slots":
            plan = RowWorkPlan(work, ~done)
        else:
            support = batch_support_for(self.pool, work.lengths, work.new_tokens, options=settings.options)
            plan = BatchWorkPlan(work, ~done, batch_size=settings.budget.batch_size, support=support)
        if not plan.total:
            return
        pool.start()
        self.job_number += 1
        worker_job = WorkerJob(
            number=self.job_number,
            engine=job.engine,
            options=settings.options,
            max_new_tokens=job.max_new_tokens,
            seed=settings.seed,
            rows=len(done),
            batch_size=settings.budget.batch_size,
            size=pool.offered.size if pool.offered is not None else None,
            token_budget=settings.budget.token_budget,
            prefix=list(plan.prefix),
            num_samples=job.num_samples,
            prefix_groups=work.prefix_groups,
        )
        pool_job = WorkerPoolJob(pool, plan, worker_job)
        try:
            yield from pool_job.completions(settings.stopping)
        finally:
            # If the caller abandons the job, workers would continue with it.
            for worker in pool.working():
                pool.stop(worker)
