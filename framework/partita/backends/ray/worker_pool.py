"""A pool of workers that hold a model: starting, asking and replacing them."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from partita.backends.ray.event_queue import LogMessage
from partita.backends.ray.messages import (
    Event,
    LoadRequest,
    ModelFacts,
    Offer,
    WorkerBackend,
    WorkerFailed,
    WorkerLocation,
    WorkerLost,
    WorkerReplied,
    WorkerReported,
)
from partita.lm.base import AnswerContext, BatchSupport, GenerationOptions
from partita.outputs.base import clip
from partita_schema.common.text import counted
from partita_schema.errors import JobError
from partita_trainers.batch_size.probe import BatchSize, Purpose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass
class WorkerState:
    """The state of one worker, as known to the pool."""

    number: int
    state: str = "starting"
    """starting, placed, loading, ready, called (a call is pending), or working (on a job)."""
    location: WorkerLocation | None = None
    heard: float = field(default_factory=time.monotonic)
    """Time of its last message."""
    batch_size: int = 0
    """Rows that it generates at a time."""

    @property
    def node(self) -> str | None:
        """Its machine, once known."""
        return self.location.node if self.location is not None else None


def describe_worker(worker: WorkerState) -> str:
    """Describe a worker for messages."""
    location = worker.location
    return f"worker {worker.number}" + (
        f" (process {location.process} on {location.node})" if location is not None else ""
    )


def log_smallest(purpose: Purpose, sizes: Sequence[BatchSize]) -> None:
    """Log the batch size that all workers use, the smallest of those that they have measured, if they have."""
    size, largest = (choose(sizes, key=lambda size: size.rows) for choose in (min, max))
    if size.max_fitting is None:
        return
    others = "" if largest.rows == size.rows else f" (another measured {largest.rows:,})"
    logger.info(
        "batch size for %s: %s on each of %s%s; up to %s fit",
        purpose,
        counted(size.rows, "row"),
        counted(len(sizes), "worker"),
        others,
        f"{size.max_fitting:,}",
    )


MAX_DEATHS = 3
"""Workers that may die consecutively without a result in between."""
GLANCE_SECONDS = 0.2
"""Longest wait for events before checking whether the job should stop."""
LONGEST_REASON = 400
"""Characters of the reason why a worker died."""


class WorkerPool:
    """A pool of workers that hold a model. Workers are started when the pool is first used."""

    def __init__(
        self,
        worker_backend: WorkerBackend,
        order: LoadRequest,
        *,
        tokenizer: "PreTrainedTokenizerFast",
        workers: int,
        timeout_seconds: float,
    ) -> None:
        """Create a pool; no worker is started yet.

        Args:
            worker_backend: Starts the workers.
            order: What each worker loads.
            tokenizer: Tokenizes the prompts in this process.
            workers: Number of workers.
            timeout_seconds: Seconds without a message after which a worker is considered lost.
        """
        self.worker_backend, self.order, self.tokenizer = worker_backend, order, tokenizer
        self.workers, self.timeout = workers, timeout_seconds
        self.active_workers: dict[int, WorkerState] = {}
        self.known: ModelFacts | None = None
        self.has_started = False
        """Whether all workers have been ready at the same time."""
        self.deaths = 0
        """Workers lost since the last result."""
        self.offered: Offer | None = None

    # Properties of the model

    @cached_property
    def facts(self) -> ModelFacts:
        """Properties of the loaded model, as reported by a worker."""
        self.start()
        assert self.known is not None
        return self.known

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model; the same as in a single process on such a device."""
        return self.facts.fingerprint

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens."""
        return self.facts.context_length

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""
        return self.facts.answer_context

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json."""
        return self.facts.checkpoint_generation

    @property
    def vocabulary_size(self) -> int:
        """Number of logits per position."""
        return self.facts.vocabulary_size

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use continuous batching; None if they can."""
        reason: str | None = self.ask("why_no_slots", options, tokens=tokens)[0]
        return reason

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows of up to `tokens` tokens can be answered in one batch."""
        support: BatchSupport = self.ask("batch_support", options, tokens=tokens)[0]
        return support

    def offer(
        self,
        options: GenerationOptions,
        *,
        lengths: npt.NDArray[np.integer],
        shared_tokens: int,
        batch_size: int | None,
        max_new_tokens: int,
    ) -> Offer:
        """Return how many rows each worker generates at a time: the smallest number that a worker has measured.

        Args:
            options: Generation options.
            lengths: Prompt lengths in tokens, [rows].
            shared_tokens: Length of the prefix that all prompts share, in tokens.
            batch_size: Rows at a time, set by the user, or None.
            max_new_tokens: Limit of generated tokens per row.
        """
        offers: list[Offer] = self.ask(
            "offer",
            options,
            lengths=lengths,
            shared_tokens=shared_tokens,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
        )
        before, self.offered = self.offered, min(offers, key=lambda offer: offer.size.rows)
        if before is None or before.size.rows != self.offered.size.rows:  # asked more than once in a job
            log_smallest("generation", [offer.size for offer in offers])
        return self.offered

    # Workers

    def start(self) -> None:
        """Start the workers and load the model. Raise JobError if some do not start.

        The first time, wait for all workers; later, wait for a replacement only if no other worker is left.
        """
        while not self.ready() or not (self.has_started or len(self.ready()) == self.workers):
            self.fill()
            for event in self.poll():
                self.handle_event(event)
            self.check_timeouts()
        self.has_started = True

    def fill(self) -> None:
        """Start workers until the pool is complete."""
        while len(self.active_workers) < self.workers:
            number = self.worker_backend.start()
            self.active_workers[number] = WorkerState(number)

    def handle_loss(self, worker: WorkerState, reason: str, *, rows: int = 0) -> None:
        """Remove a lost worker that held `rows` rows. Raise JobError if this happens repeatedly."""
        self.stop(worker)
        self.deaths += 1
        logger.debug("%s: %s", describe_worker(worker), reason)
        if self.deaths >= MAX_DEATHS:
            raise JobError(
                f"{self.deaths} workers have died one after the other without answering a row, the last one "
                f"({describe_worker(worker)}) because: {clip(reason, most=LONGEST_REASON)}. The answers so far are "
                "saved; check that the machine has enough memory, and rerun the same command to resume"
            )
        requeued = f", and its work is assigned again: {counted(rows, 'row')}" if rows else ""
        logger.warning("%s is gone; a new one replaces it%s", describe_worker(worker), requeued)

    def stop(self, worker: WorkerState) -> None:
        """Stop a worker."""
        self.worker_backend.stop(worker.number)
        self.active_workers.pop(worker.number, None)

    def ready(self) -> list[WorkerState]:
        """Return the workers without a job."""
        return [worker for worker in self.active_workers.values() if worker.state == "ready"]

    def working(self) -> list[WorkerState]:
        """Return the workers with a job."""
        return [worker for worker in self.active_workers.values() if worker.state == "working"]

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on each ready worker, and return the results of those that survive; at least one."""
        replies: list[Any] = []
        with self.stop_unfinished_calls():
            while not replies:
                self.start()
                called = self.ready()
                for worker in called:
                    self.worker_backend.ask(worker.number, method, *args, **kwargs)
                    worker.state, worker.heard = "called", time.monotonic()
                while any(worker.state == "called" for worker in self.active_workers.values()):
                    for event in self.poll():
                        if isinstance(event, WorkerReplied) and event.method == method:
                            replies.append(event.value)
                            self.active_workers[event.worker].state = "ready"
                        else:
                            self.handle_event(event)
                    self.check_timeouts()
        return replies

    def each(self, method: str, tasks: Iterable[Any], **kwargs: Any) -> list[Any]:
        """Call a method once per task, on any ready worker, and return the results in the order of the tasks."""
        results: dict[int, Any] = {}
        numbered, assigned = enumerate(tasks), dict[int, tuple[int, Any]]()
        left: list[tuple[int, Any]] = []
        """Tasks of workers that died."""
        more = True
        with self.stop_unfinished_calls():
            while more or left or assigned:
                self.fill()
                for worker in self.ready():
                    task = left.pop() if left else next(numbered, None)
                    if task is None:
                        more = False
                        break
                    assigned[worker.number] = task
                    self.worker_backend.ask(worker.number, method, task[1], **kwargs)
                    worker.state, worker.heard = "called", time.monotonic()
                for event in self.poll() if assigned or not self.ready() else ():
                    if isinstance(event, WorkerReplied) and event.method == method:
                        results[assigned.pop(event.worker)[0]] = event.value
                        self.active_workers[event.worker].state, self.deaths = "ready", 0
                        continue
                    if isinstance(event, WorkerLost) and event.worker in assigned:
                        left.append(assigned.pop(event.worker))
                    self.handle_event(event)
                self.check_timeouts()
        return [results[number] for number in sorted(results)]

    @contextmanager
    def stop_unfinished_calls(self) -> Iterator[None]:
        """Stop workers with unfinished calls if the block is left early."""
        try:
            yield
        finally:
            for worker in [worker for worker in self.active_workers.values() if worker.state == "called"]:
                self.stop(worker)

    def poll(self) -> Iterator[Event]:
        """Yield the events since the last call, except those of stopped workers."""
        for event in self.worker_backend.events(GLANCE_SECONDS):
            worker = self.active_workers.get(event.worker)
            if worker is not None:
                worker.heard = time.monotonic()
                yield event

    def handle_event(self, event: Event) -> None:
        """Update the state of a worker. Raise the error that it failed with."""
        worker = self.active_workers[event.worker]
        match event:
            case WorkerFailed():
                self.stop(worker)
                raise event.error
            case WorkerLost():
                self.handle_loss(worker, event.reason)
            case WorkerReplied(method="where"):
                worker.location, worker.state = event.value, "placed"
            case WorkerReplied(method="load"):
                self.check_same(event.value)
                worker.state = "ready"
            case WorkerReported(report=LogMessage() as message):
                logger.log(message.level, "%s: %s", describe_worker(worker), message.text)
            case _:
                raise AssertionError(f"nobody waits for {event}")
        self.load()

    def load(self) -> None:
        """Tell workers to load the model once their machine is known; at first, once the machines of all are known.

        Workers on the same machine share its memory and cores.
        """
        if self.known is None and any(worker.state == "starting" for worker in self.active_workers.values()):
            return
        for worker in [worker for worker in self.active_workers.values() if worker.state == "placed"]:
            node = [other.number for other in self.active_workers.values() if other.node == worker.node]
            self.worker_backend.ask(
                worker.number,
                "load",
                self.order,
                local_rank=node.index(worker.number),
                local_ranks=len(node),
            )
            worker.state = "loading"

    def check_same(self, facts: ModelFacts) -> None:
        """Raise JobError if a worker has loaded another model than the others."""
        if self.known is not None and self.known != facts:
            raise JobError(
                f"the workers do not have the same model ({self.known.fingerprint} and {facts.fingerprint}): their "
                "devices or the files that they see differ; let them run on machines of one kind"
            )
        self.known = facts

    def check_timeouts(self) -> None:
        """Raise JobError if no worker is working, and one has not responded in time."""
        silent = [worker for worker in self.active_workers.values() if self.is_silent(worker)]
        if silent and not self.working():
            states = [worker.state for worker in self.active_workers.values()]
            there = len(states) - states.count("starting")
            available = ", ".join(f"{amount:g} {name}" for name, amount in self.worker_backend.resources().items())
            raise JobError(
                f"{there} of {self.workers} workers have started, and {describe_worker(silent[0])} has not answered "
                f"for {self.timeout:,.0f} s (backend.timeout_seconds). In all there are {available or 'no machines'}: "
                "write a smaller backend.workers, add machines, or write a longer time"
            )

    def is_silent(self, worker: WorkerState) -> bool:
        """Return whether a response of this worker is overdue."""
        return worker.state != "ready" and time.monotonic() - worker.heard > self.timeout
