"""Requests that wait for an answer or are being answered, as rows of the scheduler."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partita.generation.prefill_plan import PASS_TOKENS, PLANNED_PROMPTS, split_into_passes
from partita.generation.requests import RowRequests
from partita.generation.scheduler import Scheduler
from partita.generation.text_stream import TextStream
from partita.generation.waiting_rows import WaitingRows
from partita.generation.work_queue import RowQueue
from partita.lm.base import AnsweringSlots, Generated, GenerationOptions, SlotRequest, TokenLogprob, common_tokens
from partita_schema.errors import JobError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer."""

    input_ids: Sequence[int]
    """The prompt, at least one token."""
    max_new_tokens: int
    """Maximum number of new tokens; prompt and new tokens fit the engine's context."""
    options: GenerationOptions
    """How it is answered."""
    key: bytes = b""
    """Seeds the random numbers, together with the seed of the file."""
    streams: bool = False
    """Whether to send the answer in pieces as it is generated."""


@dataclass(frozen=True)
class AnswerPiece:
    """A part of an answer."""

    text: str
    """New text; the pieces of an answer add up to it."""
    num_tokens: int
    """Number of new tokens so far."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the tokens since the last piece, if they are reported."""


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer, after its pieces."""

    generated: Generated | None
    """The answer; None if there is none."""
    error: str | None = None
    """Why there is no answer."""


OnEvent = Callable[[AnswerPiece | AnswerEnd], None]


@dataclass(eq=False)
class PendingAnswer:
    """A request that waits or is being answered."""

    request: AnswerRequest
    on_event: OnEvent
    """Receives the events, in the engine's thread."""
    stream: TextStream | None
    """Splits the answer into pieces; None if it is returned whole."""
    submitted: float = field(default_factory=time.perf_counter)
    row: int | None = None
    """Its row in the scheduler; None while it waits outside."""
    num_tokens: int = 0
    """New tokens of the answer so far."""
    reported: int = 0
    """Tokens whose log probabilities were sent."""
    cancelled: bool = False
    """Whether no further event is sent, and its slot is to be freed."""
    error: str | None = None
    """Why it has ended without an answer."""
    first_token: float | None = None
    """When its first token was generated."""

    def advance(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Store the new tokens so far with their log probabilities, and send the next piece if one is wanted."""
        if self.first_token is None and ids:
            self.first_token = time.perf_counter()
        self.num_tokens = max(self.num_tokens, len(ids))
        if self.stream is None:
            return
        try:
            text = self.stream.add(ids)
        except JobError as changed:
            self.finish(None, str(changed))
            self.cancelled = True
        else:
            self.send_piece(text, logprobs)

    def finish(self, generated: Generated | None, error: str | None) -> None:
        """Send the last piece if pieces are wanted, and the end."""
        if generated is not None:
            self.first_token = self.first_token or time.perf_counter()
            self.num_tokens = generated.num_tokens
            if self.stream is not None:
                try:
                    text = self.stream.finish(generated.ids, generated.text)
                except JobError as changed:
                    generated, error = None, str(changed)
                else:
                    self.send_piece(text, generated.token_logprobs)
        self.error = error
        self.send(AnswerEnd(generated, error))

    def send_piece(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Send a piece if it has text, with the log probabilities that were not sent yet."""
        if text:
            self.send(AnswerPiece(text, self.num_tokens, tuple(logprobs[self.reported :])))
            self.reported = max(self.reported, len(logprobs))

    def send(self, event: AnswerPiece | AnswerEnd) -> None:
        """Send an event. If its receiver fails, the request gets no more events, and others are not affected."""
        if self.cancelled:
            return
        try:
            self.on_event(event)
        except Exception:
            logger.exception("the receiver of an answer failed; the request is cancelled")
            self.cancelled = True


class RequestQueue:
    """Implements `RowQueue`: a row is the index of a request among those that the scheduler has taken."""

    def __init__(self, capacity: int) -> None:
        """Create a queue without requests, whose scheduler takes at most `capacity` at a time."""
        # The scheduler holds the same arrays, so they are changed in place.
        self.lengths = np.zeros(capacity, dtype=np.int64)
        self.new_tokens = np.ones(capacity, dtype=np.int64)
        self.free = deque(range(capacity))
        self.waiting: deque[PendingAnswer] = deque()
        """Requests that the scheduler has not taken, the oldest first. Only `append` is called in other threads."""
        self.taken: dict[int, PendingAnswer] = {}
        """Requests that the scheduler has taken, by row."""

    def requests(self) -> RowRequests:
        """Return the rows for the scheduler."""
        return RowRequests(
            self.lengths,
            self.new_tokens,
            fetch=lambda rows: [list(self.taken[row].request.input_ids) for row in rows],
            key=lambda row: self.taken[row].request.key,
            options=lambda row: self.taken[row].request.options,
        )

    @property
    def left(self) -> bool:
        """Return True: more requests may come at any time."""
        return True

    def take(self, wanted: int) -> Sequence[int]:
        """Return rows for all requests that wait, the oldest first; `wanted` is ignored, to choose similar lengths."""
        rows = []
        while self.waiting and self.free:
            pending = self.waiting.popleft()
            if pending.cancelled:
                continue
            row = pending.row = self.free.popleft()
            self.taken[row] = pending
            self.lengths[row] = len(pending.request.input_ids)
            self.new_tokens[row] = pending.request.max_new_tokens
            rows.append(row)
        return rows

    def release(self, row: int) -> PendingAnswer:
        """Remove the request of a row, which is free afterwards."""
        self.free.append(row)
        return self.taken.pop(row)


class WaitingRequests(WaitingRows):
    """Requests that the scheduler has taken and not started: the oldest start first, each with its cached tokens."""

    passes: Sequence[Sequence[SlotRequest]] = ()
    """Prompts to prefill together in this step, the next ones last."""

    def forget_plan(self) -> None:
        """Plan the next passes again."""
        self.passes = ()

    def next_group(self, slots: AnsweringSlots, *, free: int, prefix: int) -> list[SlotRequest]:
        """Remove the rows whose prompts are prefilled next, together, and return their requests."""
        if not self.passes or any(self.lost_tokens(one, slots) for one in self.passes[-1]):
            oldest = self.requests([*reversed(self.rows)][:free])
            self.plan_passes([replace(one, keep=True, prefix_group=0) for one in oldest], slots)
        *self.passes, group = self.passes
        started = {request.row for request in group}
        self.rows = [row for row in self.rows if row not in started]
        return list(group)

    def lost_tokens(self, request: SlotRequest, slots: AnsweringSlots) -> bool:
        """Return whether cached tokens of a planned prompt were overwritten since."""
        planned = self.uncached[request.row]
        return planned < len(request.input_ids) and slots.uncached_tokens(request) > planned

    def plan_passes(self, requests: Sequence[SlotRequest], slots: AnsweringSlots) -> None:
        """Plan which of the requests are prefilled together, the longest first.

        All of them start in this step, so their order decides only about padding, and about the lengths of
        neighbouring slots, which are attended to together. A prompt that begins like another of its pass is not
        planned: it waits, and copies that beginning then.
        """
        self.uncached = {request.row: slots.uncached_tokens(request) for request in requests}
        order = sorted(requests, key=lambda request: -self.uncached[request.row])[:PLANNED_PROMPTS]
        tokens = [self.uncached[request.row] for request in order]
        passes = []
        for start, end in reversed(split_into_passes(tokens, slots)):
            group = [order[start]]
            for request in order[start + 1 : end]:
                if not copies_more(request, group, uncached=self.uncached[request.row]):
                    group.append(request)
            passes.append(group)
        self.passes = passes


class RequestScheduler(Scheduler):
    """Scheduler of requests that arrive at any time, whose slots fit any request."""

    context_tokens = 0
    """Maximum number of tokens of a prompt and its answer together."""
    send_tokens: Callable[[], None]
    """Sends the new tokens of active requests."""

    def waiting_rows(self, source: RowQueue) -> WaitingRequests:
        """Return the waiting requests."""
        return WaitingRequests(self.work, source, plans_passes=True)

    def longest(self, rows: Sequence[int]) -> int:
        """Return `context_tokens`: the lengths of later requests are unknown."""
        return self.context_tokens

    def on_first_tokens(self) -> None:
        """Send the first tokens without waiting for the next ones."""
        self.send_tokens()

    def step(self) -> None:
        """Prefill free slots if worthwhile, and decode one token for every row."""
        self.waiting.forget_plan()
        super().step()

    def why_too_large(self, row: int) -> str:
        """Return the error of a request: its slot has `context_tokens`, however short it is."""
        return (
            f"does not fit in memory even alone, since every request gets the memory for {self.context_tokens:,} "
            "tokens; start again with a smaller --context, quantization or a smaller model"
        )


def copies_more(request: SlotRequest, group: Sequence[SlotRequest], *, uncached: int) -> bool:
    """Return whether a request could copy at least half of its `uncached` tokens, and not few, after the group."""
    cached = len(request.input_ids) - uncached
    most = max(common_tokens(request.input_ids, other.input_ids) for other in group)
    return most - cached >= max(PASS_TOKENS, uncached / 2)
