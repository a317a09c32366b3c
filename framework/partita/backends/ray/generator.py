"""Generation with a pool of workers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.backends.ray.job import WorkerPoolJob
from partita.backends.ray.messages import WorkerJob
from partita.backends.ray.work_items import BatchWorkPlan, RowWorkPlan, WorkPlan
from partita.backends.ray.worker_pool import WorkerPool
from partita.generation.engine import Engine, choose_engine, way_for
from partita.generation.prompts import Lengths
from partita.generation.requests import GenerationJob
from partita.generation.results import BatchResult
from partita.lm.base import GenerationOptions


class PoolGenerator:
    """Generates with the model of a worker pool: a `partita.generation.generator.Generator`."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.job_number = 0
        """Number of jobs so far."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens."""
        return self.pool.context_length

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
        work = job.requests(context_length=self.context_length)
        plan: WorkPlan
        if job.engine == "slots":
            plan = RowWorkPlan(work, ~done)
        else:
            way = way_for(self.pool, work.lengths, work.new_tokens, options=settings.options)
            plan = BatchWorkPlan(work, ~done, batch_size=settings.budget.batch_size, way=way)
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
        )
        pool_job = WorkerPoolJob(pool, plan, worker_job)
        try:
            yield from pool_job.completions(settings.stopping)
        finally:
            # If the caller abandons the job, workers would continue with it.
            for member in pool.working():
                pool.stop(member)
