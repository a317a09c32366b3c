"""The static engine: all rows longest first, cut into batches, each batch generated to its end.

A batch holds rows of any lengths where the model answers them beside padding as it does alone, else rows of equal
length, else a single row: `BatchWay` says which.

The plan is a function of the model, the prompts' lengths, the batch size and the context: never of what is already
done. What a row samples follows from the seed and the row's key. A job that was killed and is resumed therefore makes
the answers of an uninterrupted one: a batch of which a part is missing is generated in full, as it was.

A batch that runs out of memory is cut in two, and so are those after it as long as their rows are as long; only a row
that does not fit alone is an error. The plan stays as it was, and answers do not change.

A batch that raises anything else is tried again row by row, and only the rows that raise again are errors. A failure
of the device itself ends the job.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.inference.oom_backoff import BatchLimit, Capacity, run_with_oom_backoff
from partita.inference.prompts import Lengths, PromptSource, described
from partita.inference.results import BatchResult, RowResult, Rows, stop_if_broken, too_large
from partita.inference.work_queue import WorkQueue, drain
from partita.lm.base import PADDED, BatchWay, Generated, GenerationOptions, GenerationRequest
from partita_schema.counted import counted
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.memory import attempt
from partita_trainers.interrupt import never
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from partita.inference.fleet.worker_pool import WorkerPool
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)


def plan_batches(lengths: npt.NDArray[np.integer], *, batch_size: int, way: BatchWay = PADDED) -> list[Rows]:
    """All rows with a length, the longest first, in batches of up to `batch_size` rows that `way` allows together.

    Rows of one length stay in order.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    order = order[lengths[order] > 0]
    most = 1 if way.rows == "one row" else batch_size
    groups = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if way.rows == "equal lengths" else [order]
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def way_for(
    lm: "GenerativeModel | WorkerPool",
    lengths: npt.NDArray[np.integer],
    new_tokens: npt.NDArray[np.integer],
    *,
    options: GenerationOptions,
) -> BatchWay:
    """Which rows of these lengths, 0 for those that are not answered, can be answered together."""
    return lm.batch_way(options, tokens=int((lengths + new_tokens)[lengths > 0].max(initial=0)))


def generate_in_batches(
    lm: "GenerativeModel",
    prompts: PromptSource,
    *,
    options: GenerationOptions,
    lengths: Lengths,
    new_tokens: npt.NDArray[np.integer],
    key: Callable[[int], bytes],
    batch_size: int,
    seed: int,
    done: npt.NDArray[np.bool_],
    limit: BatchLimit,
    stopping: Callable[[], bool] = never,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[BatchResult]:
    """Answers of all rows with a length that are not `done` [rows], batch by batch, up to `new_tokens` [rows] each.

    What is sampled of a row follows from the seed and from `key` of the row. Batches are planned by `batch_size` and
    cut by `limit`, which falls where memory runs out; the ranks of `process_group` share them. Once it is `stopping`,
    none is begun. An interrupt is passed on at once, and ModelError is raised where the device fails: what was yielded
    before is complete.
    """
    way = way_for(lm, lengths, new_tokens, options=options)
    batches = plan_batches(lengths, batch_size=batch_size, way=way)
    for position in drain(WorkQueue(len(batches), process_group=process_group)):
        rows = batches[position]
        wanted = ~done[rows]
        if not wanted.any():
            continue
        if stopping():
            return
        yield from StaticBatch(
            lm,
            prompts.prompts,
            options,
            rows=rows,
            lengths=lengths[rows],
            new_tokens=new_tokens[rows],
            wanted=wanted,
            key=key,
            seed=seed,
            limit=limit,
        ).generate()


def requests_in_batches(
    lm: "GenerativeModel",
    requests: Sequence[GenerationRequest],
    *,
    options: GenerationOptions,
    capacity: Capacity,
    seed: int,
) -> list[Generated]:
    """Answers to all requests, in their order. Raises OutOfMemory where one does not fit alone."""
    lengths = np.array([len(request.input_ids) for request in requests], dtype=np.int32)
    new_tokens = np.array([request.max_new_tokens for request in requests], dtype=np.int64)
    way = way_for(lm, lengths, new_tokens, options=options)
    answers: dict[int, Generated] = {}
    for rows in plan_batches(lengths, batch_size=capacity.rows, way=way):
        batch = [requests[index] for index in rows]

        def work(
            places: range, batch: list[GenerationRequest] = batch
        ) -> tuple[list[Generated] | None, Exception | None]:
            chosen = [batch[place] for place in places]
            return attempt(lambda: lm.generate(chosen, options, seed=seed))

        def longest(places: range, batch: list[GenerationRequest] = batch) -> int:
            return max(len(batch[place].input_ids) + batch[place].max_new_tokens for place in places)

        def describe(places: range, batch: list[GenerationRequest] = batch) -> str:
            return f"{counted(len(places), 'prompt')} of {counted(len(batch[places[0]].input_ids), 'token')}"

        for part in run_with_oom_backoff(len(batch), work, limit=capacity.limit, tokens=longest, describe=describe):
            if part.result is None:
                raise OutOfMemory(
                    f"a prompt of {len(batch[part.places[0]].input_ids):,} tokens does not fit in memory even alone; "
                    "shorten it, or write a smaller max_new_tokens"
                ) from part.failure
            answers.update(zip((int(rows[place]) for place in part.places), part.result, strict=True))
    return [answers[index] for index in range(len(requests))]


@dataclass(frozen=True)
class StaticBatch:
    """A batch of the plan. Its rows are known by their places, from 0."""

    lm: "GenerativeModel"
    fetch: Callable[[Sequence[int]], list[list[int]]]
    """The tokens of prompts."""
    options: GenerationOptions
    rows: Rows
    """Place of each row in the data."""
    lengths: npt.NDArray[np.integer]
    """Tokens of each prompt."""
    new_tokens: npt.NDArray[np.integer]
    """Most new tokens of each row."""
    wanted: npt.NDArray[np.bool_]
    """Rows that are asked for."""
    key: Callable[[int], bytes]
    """What a row's random numbers follow from, next to the seed."""
    seed: int
    limit: BatchLimit
    """What cuts the batch."""

    def generate(self) -> Iterator[BatchResult]:
        """What becomes of the rows that are asked for, in one result or in several; the longest first."""
        limit = self.limit
        started, before = time.perf_counter(), limit.out_of_memory
        for part in run_with_oom_backoff(
            len(self.rows), self.attempt_part, limit=limit, tokens=self.longest, describe=self.describe
        ):
            results = part.result
            if results is None:
                results = [self.too_large(part.places[0])]
                logger.info(
                    "a row %s; going on with %s rows at a time",
                    results[0].error,
                    f"{limit.at(self.longest(part.places)):,}",
                )
            lengths = self.lengths[part.places.start : part.places.stop]
            yield BatchResult(
                results=tuple(results),
                prompt_tokens=int(lengths.sum()),
                padded_tokens=int(lengths.max()) * len(lengths),
                seconds=time.perf_counter() - started,
                batch_size=limit.at(self.longest(part.places)),
                out_of_memory=limit.out_of_memory - before,
            )
            started, before = time.perf_counter(), limit.out_of_memory

    def longest(self, places: range) -> int:
        """Tokens of the longest row of a part, with those that are generated."""
        chosen = slice(places.start, places.stop)
        return int((self.lengths[chosen] + self.new_tokens[chosen]).max())

    def describe(self, places: range) -> str:
        """A part in words."""
        return f"{counted(len(places), 'row')} of {counted(self.lengths[places[0]], 'prompt token')}"

    def attempt_part(self, places: range) -> tuple[list[RowResult] | None, Exception | None]:
        """What became of a part's rows that are asked for, or the failure where it does not fit: for `in_parts`."""
        asked = [place for place in places if self.wanted[place]]
        if not asked:
            return None, None
        try:
            answers, failure = attempt(lambda: self.answers(places))
        except Exception as error:
            stop_if_broken(error)
            reason = described(error)
        else:
            if answers is None:
                return None, failure
            return [RowResult(int(self.rows[place]), answers[place - places.start]) for place in asked], None
        # Outside the block above: while its exception is bound it holds the failed pass's tensors.
        logger.info("a batch of %s rows failed and is tried row by row: %s", len(places), reason)
        return [self.answer_alone(place) for place in asked], None

    def answer_alone(self, place: int) -> RowResult:
        """One row's answer, or its error."""
        row = int(self.rows[place])
        try:
            answers, _ = attempt(lambda: self.answers([place]))
        except Exception as error:
            stop_if_broken(error)
            return RowResult(row, None, described(error))
        if answers is not None:
            return RowResult(row, answers[0])
        self.limit.out_of_memory += 1
        return self.too_large(place)

    def answers(self, places: Sequence[int]) -> list[Generated]:
        """Answers of these rows, generated together."""
        rows = [int(self.rows[place]) for place in places]
        requests = [
            GenerationRequest(tokens, int(self.new_tokens[place]), key=self.key(row))
            for place, row, tokens in zip(places, rows, self.fetch(rows), strict=True)
        ]
        answers = self.lm.generate(requests, self.options, seed=self.seed)
        if len(answers) != len(requests):
            raise RuntimeError(
                f"the model gave {counted(len(answers), 'answer')} to {counted(len(requests), 'prompt')}"
            )
        return answers

    def too_large(self, place: int) -> RowResult:
        """A row that does not fit alone."""
        return RowResult(int(self.rows[place]), None, too_large(self.lengths[place], self.new_tokens[place]))
