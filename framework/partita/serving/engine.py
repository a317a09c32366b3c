"""The engine of a server and a chat: answers requests with continuous batching, in a thread that owns the model.

Requests join and leave the running batch at any step. Each has its own settings: sampling, stop strings, constraints.
Where the model or the file's settings do not support slots, waiting requests are answered in batches. Jobs over rows
that need more than a completion (scored labels, heads, several answers to a row) run between the steps.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from partita.generation.answer_lengths import DEFAULT_NEW_TOKENS
from partita.generation.job import PredictionPipeline
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.generation.text_stream import TextStream
from partita.lm.base import Generated, GenerationOptions
from partita.pipeline.build import LocalPipeline
from partita.serving.chat_prompts import ChatPrompts
from partita.serving.engine_counts import EngineCounts
from partita.serving.limits import MAX_WAITING
from partita.serving.request_batches import RequestBatches
from partita.serving.request_queue import AnswerRequest, OnEvent, PendingAnswer, RequestQueue, RequestScheduler
from partita.serving.row_jobs import RowJob, RowJobs
from partita_schema.common.text import describe_error
from partita_schema.errors import DataError

logger = logging.getLogger(__name__)

LONGEST_STEP_SECONDS = 30.0
"""Time to wait for the step that is computed when the engine is to end."""
MAX_REQUESTS = 256
"""Requests that are answered at a time at most."""
GAP_SECONDS = 0.005
"""Time without a new request after which the engine no longer waits for others that follow the answers of a step."""
DEFAULT_CONTEXT = 8192
"""Maximum number of tokens of a prompt and its answer, if no other is given and the model's context is not smaller."""
STOPPING = "the server is stopping"
"""The error of requests that are refused, or not answered, because the engine ends."""


class TooManyWaitingError(Exception):
    """As many requests as allowed wait already."""


class EngineStoppedError(Exception):
    """The engine answers no more requests: it is stopping, or the device failed."""


def served_tokens(limit: int | None, wanted: int | None) -> int:
    """Return the maximum number of tokens of a prompt and its answer.

    Args:
        limit: The model's context; None without limit.
        wanted: The number that was asked for; None for the default.

    Raises:
        DataError: The model's context is smaller than what was asked for.
    """
    if wanted is not None and limit is not None and wanted > limit:
        raise DataError(f"context is {wanted:,} tokens, and the model's is {limit:,}; write at most that")
    tokens = wanted or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if wanted is None and limit is not None and tokens < limit:
        logger.info(
            "a prompt and its answer may have up to %s tokens; the model's context is %s, which context sets",
            f"{tokens:,}",
            f"{limit:,}",
        )
    return tokens


@dataclass(frozen=True)
class Ticket:
    """A request that was submitted."""

    engine: "ServingEngine"
    pending: PendingAnswer

    def cancel(self) -> None:
        """Stop the answer; its slot is free within two steps, and no event follows. May be called at any time."""
        self.pending.cancelled = True
        self.engine.drop_cancelled()


def note_unused_settings(generation: GenerationOptions) -> None:
    """Log which settings of the file apply to rows, but not to chats and completions."""
    settings = {
        "decoder.constrain": generation.is_constrained,
        "decoder.scoring": generation.scores_labels,
        "generation.num_beams": generation.beams > 1,
    }
    unused = [name for name, is_set in settings.items() if is_set]
    if unused:
        hint = "; write response_format in a request" if generation.is_constrained else ""
        logger.info("chats and completions do not use %s%s", " and ".join(unused), hint)


class ServingEngine:
    """Answers requests with the model of a pipeline; a context manager that starts and stops its thread."""

    def __init__(
        self,
        pipeline: LocalPipeline,
        *,
        budget: BatchBudget,
        context_tokens: int,
        max_waiting: int = MAX_WAITING,
        row_pipeline: PredictionPipeline | None = None,
        weights: Path | None = None,
    ) -> None:
        """Prepare the engine; nothing is computed yet.

        Args:
            pipeline: The model, and the settings of the file.
            budget: How many requests are answered at a time; lowered when memory runs out.
            context_tokens: Maximum number of tokens of a prompt and its answer together.
            max_waiting: Maximum number of requests that wait.
            row_pipeline: What answers rows, with a reward model if answers are chosen. Default: the pipeline.
            weights: Folder of the trained weights; None if nothing was trained.
        """
        self.pipeline, self.lm = pipeline, pipeline.lm
        self.row_pipeline: PredictionPipeline = row_pipeline or pipeline
        """What answers rows."""
        self.weights = weights
        """Folder of the trained weights; None if nothing was trained."""
        self.budget, self.context_tokens, self.max_waiting = budget, context_tokens, max_waiting
        self.counts = EngineCounts()
        self.failure: str | None = None
        """Why the engine has failed, once it has."""
        self.queue = RequestQueue(max_waiting + budget.max_rows)
        self.jobs = RowJobs(self.row_pipeline, budget)
        self._changed = threading.Condition()
        self._cancelled = False
        """Whether a request was cancelled since the last step."""
        self._stopping = False
        """Whether no request is accepted any more."""
        self._ended = 0
        """Answers that ended in the last step."""
        self._gather_until = 0.0
        """When the engine no longer waits for requests that follow these answers."""
        self._finish_until: float | None = None
        """When accepted requests are given up."""
        if pipeline.generation.kv_cache == "paged":
            logger.warning(
                "generation.kv_cache: paged is not used: requests have their own settings, and a paged KV cache has "
                "one set of settings for all rows"
            )
        note_unused_settings(pipeline.generation)
        options = replace(pipeline.generation.unconstrained, kv_cache="slots")
        self.why_batches = self.lm.why_no_slots(options, tokens=context_tokens)
        """Why requests are answered in batches; None with continuous batching."""
        self._settings = GenerationSettings(options, budget, pipeline.config.sampling_seed)
        self._batches = RequestBatches(self.lm, self._settings, finish=self._finish)
        self._scheduler: RequestScheduler | None = None
        if self.why_batches is None:
            self._scheduler = RequestScheduler(self.lm, self.queue.requests(), self._settings, rows=self.queue)
            self._scheduler.context_tokens = context_tokens
            self._scheduler.send_tokens = self._send_tokens
        self._thread = threading.Thread(target=self._run, name="partita engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(finish_seconds=0.0)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.lm.tokenizer

    @cached_property
    def prompts(self) -> ChatPrompts:
        """Encodes the messages of chats."""
        return ChatPrompts(self.pipeline)

    @property
    def options(self) -> GenerationOptions:
        """The generation options of the file without constraints; `sampling_options` changes them for a request."""
        return self._settings.options

    @property
    def default_new_tokens(self) -> int:
        """Limit of generated tokens of a request without one."""
        return self.pipeline.config.generation.max_new_tokens or max(self.pipeline.max_new_tokens, DEFAULT_NEW_TOKENS)

    # Called in any thread

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self.queue.waiting) + len(self.queue.taken) - self._live + len(self.jobs.waiting)

    @property
    def active(self) -> int:
        """Number of requests that are being answered."""
        return self._live + len(self._batches.running) + len(self.jobs.running)

    @property
    def _live(self) -> int:
        """Number of slots in use."""
        scheduler = self._scheduler
        slots = scheduler.slots if scheduler is not None else None
        return len(slots.live) if slots is not None else 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is being answered."""
        waiting = self.queue.waiting or self.queue.taken or self.jobs.waiting
        return not (waiting or self._batches.running or self.jobs.running)

    def submit(self, request: AnswerRequest, on_event: OnEvent) -> Ticket:
        """Accept a request.

        Args:
            request: The request; its prompt and new tokens fit `context_tokens`.
            on_event: Receives pieces and the end of the answer, in the engine's thread.

        Raises:
            TooManyWaitingError: As many requests as allowed wait already.
            EngineStoppedError: The engine is stopping or has failed.
        """
        stream = TextStream(self.tokenizer, stop=request.options.stop) if request.streams else None
        pending = PendingAnswer(request, on_event, stream)
        with self._changed:
            self._check_accepts()
            self.queue.waiting.append(pending)
            self.counts.requests += 1
            self.counts.prompt_tokens += len(request.input_ids)
            self._changed.notify()
        return Ticket(self, pending)

    def submit_job(self, job: RowJob) -> None:
        """Accept rows; raises what `submit` raises."""
        with self._changed:
            self._check_accepts()
            self.jobs.add(job)
            self.counts.requests += 1
            self._changed.notify()

    def drop_cancelled(self) -> None:
        """Free the slots of cancelled requests before the next step."""
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def refuse_new(self) -> None:
        """Accept no more requests; those that were accepted are still answered."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def finish_within(self, seconds: float) -> None:
        """Accept no more requests, and end the thread once the accepted ones are answered, or after `seconds`.

        Requests that are not answered in time end with the error STOPPING.
        """
        with self._changed:
            self._stopping = True
            self._finish_until = time.monotonic() + seconds
            self._changed.notify()

    def stop(self, *, finish_seconds: float) -> None:
        """Call `finish_within`, and wait for the end of the thread."""
        self.finish_within(finish_seconds)
        if self._thread.ident is not None:
            self._thread.join(finish_seconds + LONGEST_STEP_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, so that every accepted request has an answer or an error."""
        return not self._thread.is_alive()

    @property
    def why_closed(self) -> str | None:
        """Why no requests are accepted; None if they are."""
        if self.failure is not None:
            return f"the engine has failed: {self.failure}"
        return STOPPING if self._stopping else None

    def _check_accepts(self) -> None:
        if self.why_closed is not None:
            raise EngineStoppedError(self.why_closed)
        if self.waiting >= self.max_waiting:
            raise TooManyWaitingError(f"{self.max_waiting:,} requests wait already; try again later")

    # Called in the engine's thread

    def _run(self) -> None:
        reason = STOPPING
        try:
            with self.lm.evaluating():
                while self._wait():
                    self._gather()
                    self._drop_cancelled()
                    self._answer_some()
        except Exception as error:
            self.failure = reason = describe_error(error)
            logger.error("the engine has failed: %s", reason)
            logger.debug("the error of the engine", exc_info=True)
        finally:
            self._give_up(reason)
            if self._scheduler is not None:
                self._scheduler.close_slots()

    def _wait(self) -> bool:
        """Wait for work; return False once the engine is to end."""
        with self._changed:
            while True:
                if self._finish_until is not None and (self.is_idle or time.monotonic() >= self._finish_until):
                    return False
                if not self.is_idle:
                    return True
                self._changed.wait()

    def _gather(self) -> None:
        """Wait for further requests if most answers of the batch have just ended, for the time of a step at most.

        Clients often send the next request when they have an answer. If the first of them started alone, the others
        would wait for that step, and the batch would fall apart into small ones.
        """
        ended, self._ended = self._ended, 0
        if ended < 2 or ended < self._live:
            return
        with self._changed:
            while len(self.queue.waiting) < ended and (left := self._gather_until - time.monotonic()) > 0:
                before = self.counts.requests
                self._changed.wait(min(GAP_SECONDS, left))
                if self.counts.requests == before:
                    return

    def _answer_some(self) -> None:
        """Answer the jobs that wait, and run a step of the scheduler, or a batch."""
        self.jobs.run()
        if self._scheduler is None:
            with self._changed:
                self._batches.take(self.queue.waiting)
            self._batches.answer()
        elif self.queue.waiting or self.queue.taken:
            self._step(self._scheduler)

    def _step(self, scheduler: RequestScheduler) -> None:
        """Decode a token of every active request, and send pieces and answers."""
        started = time.monotonic()
        if scheduler.refill():
            scheduler.step()
            self.counts.steps += 1
        results, scheduler.results = scheduler.results, []
        self._send_tokens()
        for result in results:
            self._finish(self.queue.release(result.row), result.generated, result.error)
        now = time.monotonic()
        self._ended, self._gather_until = len(results), now + (now - started)

    def _send_tokens(self) -> None:
        """Send the new tokens of active requests."""
        slots = self._scheduler.slots if self._scheduler is not None else None
        for active in slots.live if slots is not None else ():
            pending = self.queue.taken[active.request.row]
            if pending.stream is not None or pending.first_token is None:
                pending.advance(active.new, active.token_logprobs)

    def _finish(self, pending: PendingAnswer, generated: Generated | None, error: str | None) -> None:
        """Send the end of an answer, and count it."""
        if pending.cancelled:
            return
        pending.finish(generated, error)
        self.counts.add(pending, failed=pending.error is not None)

    def _drop_cancelled(self) -> None:
        """Free the slots of cancelled requests."""
        if not self._cancelled and not any(pending.cancelled for pending in self.queue.taken.values()):
            return
        self._cancelled = False
        with self._changed:
            left = [pending for pending in self.queue.waiting if not pending.cancelled]
            self.counts.cancelled += len(self.queue.waiting) - len(left)
            self.queue.waiting = deque(left)
        stopped = {row for row, pending in self.queue.taken.items() if pending.cancelled}
        if stopped and self._scheduler is not None:
            self._scheduler.cancel(stopped)
        for row in stopped:
            pending = self.queue.release(row)
            if pending.error is None:
                self.counts.cancelled += 1
            else:
                self.counts.add(pending, failed=True)

    def _give_up(self, reason: str) -> None:
        """Accept nothing more, and end all requests with an error."""
        with self._changed:
            self._stopping = True
        left = [*self._batches.running, *self.queue.taken.values(), *self.queue.waiting]
        for requests in (self._batches.running, self.queue.taken, self.queue.waiting):
            requests.clear()
        for pending in left:
            self._finish(pending, None, reason)
        self.jobs.give_up(EngineStoppedError(reason))
