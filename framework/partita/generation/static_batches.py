"""The static engine: rows are sorted by length, split into batches, and each batch is generated to its end.

A batch holds rows of any length if the model's answers do not depend on padding, else rows of equal length, else a
single row; see `BatchSupport`.

The plan is a function of the model, the prompt lengths, the batch size and the context, never of the progress.
Samples depend on the seed and the row's key. A resumed job therefore gives the same answers as an uninterrupted one:
a batch with missing rows is generated in full.

A batch that runs out of memory is split in two, and so are the following ones as long as their rows are as long;
only a row that does not fit alone is an error. The plan and the answers do not change.

A batch that raises another error is retried row by row, and only rows that raise again are errors. A failure of the
device ends the job.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.generation.engine import batch_support_for
from partita.generation.oom_backoff import run_with_oom_backoff
from partita.generation.requests import (
    BatchResult,
    GenerationSettings,
    RowRequests,
    RowResult,
    Rows,
    stop_if_broken,
    too_large,
)
from partita.generation.spent import Spent
from partita.generation.work_queue import WorkQueue, drain
from partita.lm.base import PADDED, BatchSupport, Generated, GenerationRequest
from partita_schema.common.text import counted, describe_error
from partita_schema.errors import OutOfMemory, RowError
from partita_trainers.batch_size.device_errors import attempt

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)


def plan_batches(lengths: npt.NDArray[np.integer], *, batch_size: int, support: BatchSupport = PADDED) -> list[Rows]:
    """Split all rows with a length into batches of up to `batch_size`, the longest rows first.

    Rows share a batch only if `support` allows it. Rows of equal length keep their order.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    order = order[lengths[order] > 0]
    most = 1 if support.rows == "one row" else batch_size
    groups = (
        np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if support.rows == "equal lengths" else [order]
    )
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


Complete = Callable[[Sequence[int], Sequence[GenerationRequest]], list[Generated]]
"""Returns the completions of rows with these requests."""


def generate_in_batches(
    lm: "GenerativeModel",
    work: RowRequests,
    settings: GenerationSettings,
    *,
    done: npt.NDArray[np.bool_],
    complete: Complete | None = None,
) -> Iterator[BatchResult]:
    """Generate answers for all rows with a length that are not `done`, and yield them batch by batch.

    An interrupt is raised at once; everything yielded is complete.

    Args:
        lm: The model.
        work: The rows with their prompts.
        settings: How they are generated; the budget is lowered when memory runs out.
        done: Rows that are answered already, [rows].
        complete: Generates the rows of a batch. Default: one completion by the model for each.

    Raises:
        JobError: The device failed.
    """
    support = batch_support_for(lm, work.lengths, work.new_tokens, options=settings.options)
    plan = plan_samples(work.lengths, work.num_samples, batch_size=settings.budget.batch_size, support=support)
    for position in drain(WorkQueue(len(plan), process_group=settings.process_group)):
        for rows in plan[position]:
            wanted = ~done[rows]
            if not wanted.any():
                continue
            if settings.stopping():
                return
            yield from StaticBatch(
                lm,
                settings,
                work.fetch,
                work.key,
                rows=rows,
                lengths=work.lengths[rows],
                new_tokens=work.new_tokens[rows],
                wanted=wanted,
                complete=complete,
            ).generate()


def plan_samples(
    lengths: npt.NDArray[np.integer], num_samples: int, *, batch_size: int, support: BatchSupport = PADDED
) -> list[list[Rows]]:
    """Split all rows with a length into batches, in groups that are each for one process; see `plan_batches`.

    Args:
        lengths: Length of each row.
        num_samples: How many consecutive rows have the same prompt; such rows are in the same group.
        batch_size: Most rows of a batch.
        support: Which rows can share a batch.
    """
    if num_samples == 1:
        return [[rows] for rows in plan_batches(lengths, batch_size=batch_size, support=support)]
    prompts = plan_batches(lengths[::num_samples], batch_size=max(1, batch_size // num_samples), support=support)
    most = 1 if support.rows == "one row" else batch_size
    groups = [(rows[:, None] * num_samples + np.arange(num_samples)).ravel() for rows in prompts]
    return [[group[start : start + most] for start in range(0, len(group), most)] for group in groups]


def requests_in_batches(
    lm: "GenerativeModel", requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> list[Generated]:
    """Generate answers to all requests, and return them in input order. Raise OutOfMemory if a single one does not fit.

    Args:
        lm: The model.
        requests: The prompts.
        settings: How they are generated.
    """
    options = settings.options
    lengths = np.array([len(request.input_ids) for request in requests], dtype=np.int32)
    new_tokens = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
    support = batch_support_for(lm, lengths, new_tokens, options=options)
    answers: dict[int, Generated] = {}
    for rows in plan_batches(lengths, batch_size=settings.budget.batch_size, support=support):
        batch = [requests[index] for index in rows]

        def work(
            indices: range, batch: list[GenerationRequest] = batch
        ) -> tuple[list[Generated] | None, Exception | None]:
            chosen = [batch[index] for index in indices]
            return attempt(lambda: lm.generate(chosen, options, seed=settings.seed))

        def longest(indices: range, batch: list[GenerationRequest] = batch) -> int:
            return max(len(batch[index].input_ids) + batch[index].max_new_tokens for index in indices)

        def describe(indices: range, batch: list[GenerationRequest] = batch) -> str:
            return f"{counted(len(indices), 'prompt')} of {counted(len(batch[indices[0]].input_ids), 'token')}"

        for part in run_with_oom_backoff(len(batch), work, budget=settings.budget, tokens=longest, describe=describe):
            if part.result is None:
                raise OutOfMemory(
                    f"a prompt of {len(batch[part.indices[0]].input_ids):,} tokens does not fit in memory even alone; "
                    "shorten it, or write a smaller max_new_tokens"
                ) from part.failure
            answers.update(zip((int(rows[index]) for index in part.indices), part.result, strict=True))
    return [answers[index] for index in range(len(requests))]


def requests_or_errors(
    lm: "GenerativeModel", requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> list[RowResult]:
    """Return the answer or the error of each request, in input order; if they fail together, each is answered alone.

    See `requests_in_batches` for the arguments. Raises JobError if the device failed.
    """
    try:
        answers = requests_in_batches(lm, requests, settings)
    except Exception as error:
        stop_if_broken(error)
        reason = describe_error(error)
    else:
        return [RowResult(index, answer) for index, answer in enumerate(answers)]
    # Outside the block above: a bound exception keeps the tensors of the failed pass alive.
    if len(requests) == 1:
        return [RowResult(0, None, reason)]
    logger.info("%s failed together and are answered one by one: %s", counted(len(requests), "prompt"), reason)
    alone = [requests_or_errors(lm, [request], settings)[0] for request in requests]
    return [replace(result, row=index) for index, result in enumerate(alone)]


@dataclass(frozen=True)
class StaticBatch:
    """A batch of the plan. Its rows are addressed by their index in the batch."""

    lm: "GenerativeModel"
    settings: GenerationSettings
    """How it is generated; the budget limits the rows of a forward pass."""
    fetch: Callable[[Sequence[int]], list[list[int]]]
    """Returns the prompt tokens of rows."""
    key: Callable[[int], bytes]
    """Returns the sampling key of a row."""
    rows: Rows
    """Index of each row in the dataset."""
    lengths: npt.NDArray[np.integer]
    """Tokens of each prompt."""
    new_tokens: npt.NDArray[np.integer]
    """Limit of generated tokens of each row."""
    wanted: npt.NDArray[np.bool_]
    """Which rows are requested."""
    complete: Complete | None = None
    """Generates the rows; None for one completion by the model for each."""

    def generate(self) -> Iterator[BatchResult]:
        """Generate the batch, whole or split, and yield the results of the requested rows."""
        budget = self.settings.budget
        started, before = time.perf_counter(), budget.out_of_memory
        for part in run_with_oom_backoff(
            len(self.rows), self.attempt_part, budget=budget, tokens=self.longest, describe=self.describe
        ):
            results = part.result
            if results is None:
                results = [self.too_large(part.indices[0])]
                logger.info(
                    "a row %s; continuing with %s rows at a time",
                    results[0].error,
                    f"{budget.limit_at(self.longest(part.indices)):,}",
                )
            lengths = self.lengths[part.indices.start : part.indices.stop]
            spent = Spent(
                prompt_tokens=int(lengths.sum()),
                padded_tokens=int(lengths.max()) * len(lengths),
                seconds=time.perf_counter() - started,
                out_of_memory=budget.out_of_memory - before,
            )
            yield BatchResult(tuple(results), spent, batch_size=budget.limit_at(self.longest(part.indices)))
            started, before = time.perf_counter(), budget.out_of_memory

    def longest(self, indices: range) -> int:
        """Return the length of a part's longest row, including new tokens."""
        chosen = slice(indices.start, indices.stop)
        return int((self.lengths[chosen] + self.new_tokens[chosen]).max())

    def describe(self, indices: range) -> str:
        """Describe a part for the log."""
        return f"{counted(len(indices), 'row')} of {counted(self.lengths[indices[0]], 'prompt token')}"

    def attempt_part(self, indices: range) -> tuple[list[RowResult] | None, Exception | None]:
        """Return the results of a part's requested rows, or the failure if it does not fit."""
        wanted_indices = [index for index in indices if self.wanted[index]]
        if not wanted_indices:
            return None, None
        try:
            answers, failure = attempt(lambda: self.answers(indices))
        except Exception as error:
            stop_if_broken(error)
            reason = describe_error(error)
        else:
            if answers is None:
                return None, failure
            return [RowResult(int(self.rows[index]), answers[index - indices.start]) for index in wanted_indices], None
        # Outside the block above: a bound exception keeps the tensors of the failed pass alive.
        logger.info("a batch of %s rows failed and is tried row by row: %s", len(indices), reason)
        return [self.answer_alone(index) for index in wanted_indices], None

    def answer_alone(self, index: int) -> RowResult:
        """Generate one row alone, and return its answer or error."""
        row = int(self.rows[index])
        try:
            answers, _ = attempt(lambda: self.answers([index]))
        except Exception as error:
            stop_if_broken(error)
            return RowResult(row, None, str(error) if isinstance(error, RowError) else describe_error(error))
        if answers is not None:
            return RowResult(row, answers[0])
        self.settings.budget.out_of_memory += 1
        return self.too_large(index)

    def answers(self, indices: Sequence[int]) -> list[Generated]:
        """Generate these rows together."""
        rows = [int(self.rows[index]) for index in indices]
        requests = [
            GenerationRequest(tokens, int(self.new_tokens[index]), key=self.key(row))
            for index, row, tokens in zip(indices, rows, self.fetch(rows), strict=True)
        ]
        if self.complete is not None:
            return self.complete(rows, requests)
        answers = self.lm.generate(requests, self.settings.options, seed=self.settings.seed)
        if len(answers) != len(requests):
            raise RuntimeError(
                f"the model gave {counted(len(answers), 'answer')} to {counted(len(requests), 'prompt')}"
            )
        return answers

    def too_large(self, index: int) -> RowResult:
        """Return the error of a row that does not fit alone."""
        return RowResult(int(self.rows[index]), None, too_large(self.lengths[index], self.new_tokens[index]))
