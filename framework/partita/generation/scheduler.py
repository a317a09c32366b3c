"""Continuous batching: a finished row frees its slot of the KV cache at once, and the next row takes it.

Rows start with the longest prompt, so that memory runs out at the beginning or never, and prompts of one prefill have
similar lengths. The common prefix of all prompts is computed once. With greedy decoding, rows with equal prompts are
generated once; several samples of a row share one prefill of its prompt. A sampled answer depends on the seed and the
row's key only: not on neighbouring rows, the number of slots, or restarts.

When memory runs out, the number of slots is halved and their rows start again; only a row that does not fit alone is
an error. Prompts that fail to prefill together are prefilled one by one, and when a decoding step fails, each of its
rows is generated alone: only rows that fail again are errors. A failure of the device ends the job.
"""

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.generation.requests import (
    BatchResult,
    GenerationSettings,
    RowRequests,
    RowResult,
    common_prefix,
    plan,
    stop_if_broken,
    too_large,
)
from partita.generation.spent import Spent
from partita.generation.waiting_rows import WaitingRows
from partita.generation.work_queue import PlannedRowQueue, RowQueue
from partita.lm.base import AnsweringSlots, SlotAnswer, SlotRequest
from partita_schema.common.text import describe_error
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.device_errors import attempt, free_everything

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)

PREFILL_DIVISOR = 8
"""Prompts are prefilled once 1/8 of the slots is free: a larger prefill is cheaper by row."""
MAX_SLOT_FACTOR = 4
"""Most slots for short rows as a multiple of those for the longest rows, if memory is the limit."""
MAX_YIELD_DELAY = 0.02
"""Longest wait before results are yielded, in seconds."""


class Scheduler:
    """Runs rows through the slots of a model."""

    def __init__(
        self,
        lm: "GenerativeModel",
        work: RowRequests,
        settings: GenerationSettings,
        *,
        rows: "npt.NDArray[np.bool_] | RowQueue",
        tolerant: bool = True,
    ) -> None:
        """Plan the rows; no slots are opened yet.

        Args:
            lm: The model.
            work: The rows with their prompts.
            settings: How they are generated; the budget is lowered when memory runs out.
            rows: Rows to answer, [rows], shared by the ranks of the process group. Or a queue to take rows from, the
                longest first; all begin with `work.prefix`.
            tolerant: Whether an error of a row becomes its result; otherwise it is raised.
        """
        self.lm = lm
        self.work = work
        self.settings = settings
        self.options = settings.options
        self.budget = settings.budget
        self.tolerant = tolerant
        self.copies: Mapping[int, Sequence[int]] = {}
        """Rows with the same prompt as a planned row, by that row."""
        if isinstance(rows, np.ndarray):
            order, self.copies = plan(work, rows)
            source: RowQueue = PlannedRowQueue(order, process_group=settings.process_group, together=work.num_samples)
            self.prefix = list(common_prefix(work, order))
        else:
            source = rows
            self.prefix = list(work.prefix)
        self.waiting = self.waiting_rows(source)
        self.slots: AnsweringSlots | None = None
        self.num_slots = 0
        """Number of open slots."""
        self.tokens = 0
        """Length of each slot in tokens."""
        self.limit_before_oom: tuple[int, int | None] | None = None
        """Limit of the budget to restore if one row alone turns out not to fit; None after a decoding step succeeds."""
        self.results: list[RowResult] = []
        self.begin_count()

    def begin_count(self) -> None:
        """Begin to count what the next results take."""
        self.started, self.spent = time.perf_counter(), Spent()

    def waiting_rows(self, source: RowQueue) -> WaitingRows:
        """Return the waiting rows, which choose the prompts of each prefill."""
        return WaitingRows(self.work, source, plans_passes=self.lm.device.type == "cpu")

    def completions(self) -> Iterator[BatchResult]:
        """Yield results as rows finish."""
        with closing(self.run()) as steps:
            for _ in steps:
                if self.results and self.is_due():
                    yield self.take_finished()
                    self.started = time.perf_counter()
            if self.results:
                yield self.take_finished()

    def steps(self) -> Iterator[list[RowResult]]:
        """Yield the results of each step; in between, `unfinished` returns the running rows."""
        with closing(self.run()) as steps:
            for _ in steps:
                results, self.results = self.results, []
                yield results

    def unfinished(self) -> list[tuple[int, list[int]]]:
        """Return the running rows with their tokens so far."""
        return [(row.request.row, row.new) for row in self.slots.live] if self.slots is not None else []

    def run(self) -> Generator[None]:
        """Run step by step until all rows are finished; afterwards the model is in its previous mode."""
        with self.lm.evaluating():
            try:
                while self.refill():
                    self.step()
                    yield
            finally:
                self.close_slots()

    def refill(self) -> bool:
        """Take more rows from the source if few wait, and return whether rows are left to start or to finish."""
        waiting = self.waiting
        if self.settings.stopping():
            waiting.remove_new()
        elif waiting.source.left and len(waiting.rows) * PREFILL_DIVISOR <= self.num_slots:
            waiting.take(self.num_slots or min(self.budget.batch_size, self.budget.current_limit))
        return bool(waiting.rows) or (self.slots is not None and bool(self.slots.live))

    def is_due(self) -> bool:
        """Return whether there are results of a whole pass, or they have waited long enough to be yielded."""
        return len(self.results) >= self.num_slots or time.perf_counter() - self.started >= MAX_YIELD_DELAY

    def take_finished(self) -> BatchResult:
        """Return the results since the last call, with what they took."""
        results, self.results = tuple(self.results), []
        spent = replace(self.spent, seconds=time.perf_counter() - self.started)
        self.begin_count()
        return BatchResult(results, spent, batch_size=self.num_slots or self.budget.current_limit)

    def step(self) -> None:
        """Prefill free slots if worthwhile, and decode one token for every row."""
        slots = self.open_slots()
        if slots is None:
            return
        if self.should_reopen():
            # Start no more rows; once all have finished, the next step opens more, shorter slots.
            if not slots.live:
                self.close_slots()
                return
        elif self.waiting.rows and self.should_prefill(slots):
            while self.waiting.rows and len(slots.live) < self.num_slots:
                free = self.num_slots - len(slots.live)
                if not self.prefill(slots, self.waiting.next_group(slots, free=free, prefix=len(self.prefix))):
                    return
                self.on_first_tokens()
                if not slots.live and self.is_due():
                    return
        if slots.live:
            self.decode_step(slots)

    def on_first_tokens(self) -> None:
        """Called when prompts were prefilled, which gives the first token of each, before the next ones are decoded."""

    def max_slots_for(self, tokens: int) -> int:
        """Return the number of slots for rows of up to `tokens` tokens."""
        budget = self.budget
        most = min(budget.batch_size, budget.limit_at(tokens))
        if budget.token_budget is not None:
            token_budget = budget.token_budget
            if budget.limit_tokens is not None:
                token_budget = min(token_budget, budget.current_limit * budget.limit_tokens)
            most = max(most, min(MAX_SLOT_FACTOR * budget.batch_size, token_budget // tokens))
        return max(1, most if self.waiting.source.left else min(most, len(self.waiting.rows)))

    def should_reopen(self) -> bool:
        """Return whether the remaining rows are so short that twice as many slots of their length would fit."""
        if self.budget.token_budget is None or not self.waiting.rows:
            return False
        if 2 * self.longest(self.waiting.rows[-1:]) > self.tokens:
            return False
        tokens = self.longest(self.waiting.rows)  # a shorter prompt may have a longer answer
        return 2 * tokens <= self.tokens and self.max_slots_for(tokens) >= 2 * self.num_slots

    def longest(self, rows: Sequence[int]) -> int:
        """Return the most tokens, prompt and answer, that one of these rows may have."""
        return self.work.longest(rows)

    def should_prefill(self, slots: AnsweringSlots) -> bool:
        """Return whether enough slots are free for a prefill."""
        free = self.num_slots - len(slots.live)
        return not slots.live or free * PREFILL_DIVISOR >= self.num_slots or free >= len(self.waiting.rows)

    # Operations that can fail

    def open_slots(self) -> AnsweringSlots | None:
        """Return the slots; open them if there are none. Return None if they did not fit."""
        if self.slots is not None:
            return self.slots
        tokens = self.longest(self.waiting.rows)
        count = self.max_slots_for(tokens)
        try:
            opened, failure = attempt(
                lambda: self.lm.open_slots(
                    self.options, slots=count, tokens=tokens, prefix=self.prefix, seed=self.settings.seed
                )
            )
        except Exception as error:
            stop_if_broken(error)
            if not self.tolerant or not self.prefix:
                raise
            # Every row begins with the prefix, and each gets its own error.
            logger.info("the shared prefix of the prompts cannot be computed: %s", describe_error(error))
            self.prefix = []
            return None
        self.num_slots, self.tokens = count, tokens
        if opened is None:
            self.shrink(failure, [])
        self.slots = opened
        self.spent += Spent(prompt_tokens=len(self.prefix), padded_tokens=len(self.prefix))
        return opened

    def prefill(self, slots: AnsweringSlots, group: Sequence[SlotRequest]) -> bool:
        """Prefill prompts together, or one by one if that fails. Return False if the slots were closed."""
        computed = self.computed(slots, group)
        started = time.perf_counter()
        ended, failure, reason = self.run_guarded(lambda: slots.admit(group))
        if reason is None:
            self.spent += Spent(prefill_seconds=time.perf_counter() - started)
            self.count_tokens(slots, computed)
            return self.record_or_shrink(ended, failure, group)
        if len(group) == 1:
            self.record(RowResult(group[0].row, None, reason))
            return True
        logger.info("%s prompts failed together and are computed one by one: %s", len(group), reason)
        for index, request in enumerate(group):
            if not self.prefill(slots, [request]):
                self.waiting.rows += [other.row for other in reversed(group[index + 1 :])]
                return False
        return True

    def decode_step(self, slots: AnsweringSlots) -> None:
        """Decode one more token for every row."""
        started, live = time.perf_counter(), len(slots.live)
        ended, failure, reason = self.run_guarded(slots.step)
        if reason is not None:
            self.answer_alone([row.request for row in slots.live], reason)
            return
        seconds = time.perf_counter() - started
        self.spent += Spent(decode_seconds=seconds, slot_steps=self.num_slots, row_steps=live)
        if self.record_or_shrink(ended, failure, []):
            self.limit_before_oom = None

    def run_guarded(
        self, work: Callable[[], list[SlotAnswer]]
    ) -> tuple[list[SlotAnswer] | None, Exception | None, str | None]:
        """Run an operation on the slots; return its answers, the out-of-memory failure, or another error as text."""
        try:
            return *attempt(work), None
        except Exception as error:
            stop_if_broken(error)
            if not self.tolerant:
                raise
            reason = describe_error(error)
        # Outside the block above: a bound exception keeps the tensors of the failed pass alive.
        return None, None, reason

    def answer_alone(self, requests: list[SlotRequest], reason: str) -> None:
        """Generate rows one by one that failed together."""
        self.close_slots()
        if len(requests) == 1:
            self.record(RowResult(requests[0].row, None, reason))
            return
        logger.info("a step of %s rows failed and they are answered one by one: %s", len(requests), reason)
        settings = GenerationSettings(self.options, self.budget, self.settings.seed)
        for request in requests:
            work = replace(self.work, prefix=(), digests=None, num_samples=1, prefix_groups=None)
            alone = np.zeros(len(self.work.lengths), dtype=np.bool_)
            alone[request.row] = True
            run = Scheduler(self.lm, work, settings, rows=alone)
            for batch in run.completions():
                for result in batch.results:
                    self.record(result)

    def record_or_shrink(
        self, ended: list[SlotAnswer] | None, failure: Exception | None, group: Sequence[SlotRequest]
    ) -> bool:
        """Record answers and return True; if memory ran out, halve the slots and return False."""
        if ended is None:
            self.shrink(failure, group)
            return False
        for answer in ended:
            self.record(RowResult(answer.request.row, answer.generated, answer.error))
        return True

    def shrink(self, failure: Exception | None, group: Sequence[SlotRequest]) -> None:
        """Halve the slots; their rows, and the prompts of an unfinished prefill, start again."""
        requests = [*group, *(row.request for row in (self.slots.live if self.slots is not None else ()))]
        rows = [request.row for request in requests] or [self.waiting.rows.pop()]
        self.close_slots()
        free_everything()
        self.budget.out_of_memory += 1
        self.spent += Spent(out_of_memory=1)
        if self.num_slots == 1:
            # Batches that contained this row may have failed because of it.
            if self.limit_before_oom is not None:
                self.budget.current_limit, self.budget.limit_tokens = self.limit_before_oom
            self.limit_before_oom = None
            for row in rows:
                reason = self.why_too_large(row)
                logger.info("a row %s; continuing with %s rows at a time", reason, f"{self.budget.current_limit:,}")
                if not self.tolerant:
                    raise OutOfMemory(f"a prompt {reason}") from failure
                self.record(RowResult(row, None, reason))
            return
        self.waiting.put_back(rows)
        longest = self.longest(rows)
        self.limit_before_oom = self.limit_before_oom or (self.budget.current_limit, self.budget.limit_tokens)
        self.budget.current_limit, self.budget.limit_tokens = (self.num_slots + 1) // 2, longest
        logger.warning(
            "out of memory with %s rows of up to %s tokens: continuing with %s",
            f"{self.num_slots:,}",
            f"{longest:,}",
            f"{self.budget.current_limit:,}",
        )
        logger.debug("device error: %s", failure)

    def why_too_large(self, row: int) -> str:
        """Return the error of a row that does not fit in memory alone."""
        return too_large(int(self.work.lengths[row]), int(self.work.new_tokens[row]))

    def cancel(self, rows: Collection[int]) -> None:
        """Stop rows, whether they wait or are active; they get no result."""
        self.waiting.remove(rows)
        if self.slots is not None:
            self.slots.cancel(rows)

    def close_slots(self) -> None:
        """Close the slots."""
        if self.slots is not None:
            self.slots.close()
        self.slots = None
        self.waiting.forget_plan()

    # Bookkeeping

    def computed(self, slots: AnsweringSlots, group: Sequence[SlotRequest]) -> list[SlotRequest]:
        """Return the requests of a group whose prompt is computed, and not that of another request."""
        known = {row.request.shared for row in slots.live}
        first = {request.shared: request for request in reversed(group) if request.shared not in known}
        return [one for one in group if one.shared is None or first.get(one.shared) is one]

    def count_tokens(self, slots: AnsweringSlots, group: Sequence[SlotRequest]) -> None:
        """Count the tokens of a prefill of these prompts."""
        if not group:
            return
        uncached, prefix = self.waiting.uncached, len(self.prefix)
        lengths = [uncached.get(request.row, len(request.input_ids) - prefix) for request in group]
        padded = slots.padded_length(max(lengths)) * len(lengths)
        self.spent += Spent(prompt_tokens=sum(lengths), padded_tokens=padded)

    def record(self, result: RowResult) -> None:
        """Record the result of a row, and of rows with the same prompt."""
        self.results.append(result)
        for row in self.copies.get(result.row, ()):
            self.results.append(RowResult(row, result.generated, result.error))
