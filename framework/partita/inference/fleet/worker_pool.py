"""A model that several workers hold. This process deals rows, longest first, and hands on what comes back at once.

A worker is dealt as many rows as keep it busy until its next answers are here, and less towards the end, so that all
come to it together. A worker that dies leaves what it has not answered to the others, and another one takes its place:
no row is lost, and none is answered twice. What a row raises inside a worker is that row's error, as in one process.
What befalls a worker as a whole ends the job.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from partita.inference.fleet.job import WorkerPoolJob
from partita.inference.fleet.messages import LoadRequest, LogMessage, ModelFacts, Offer, WorkerJob
from partita.inference.fleet.work_items import BatchWorkPlan, RowWorkPlan, WorkPlan
from partita.inference.fleet.worker_backend import (
    Event,
    WorkerBackend,
    WorkerFailed,
    WorkerLost,
    WorkerReplied,
    WorkerReported,
)
from partita.inference.fleet.worker_state import WorkerState, described
from partita.inference.reading import clipped
from partita.inference.results import BatchResult
from partita.inference.scheduler import RowRequests
from partita.inference.static_batches import way_for
from partita.lm.base import BatchWay, GenerationOptions
from partita_schema.counted import counted
from partita_schema.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

MOST_DEATHS = 3
"""Workers that may die one after the other without a row in between."""
GLANCE_SECONDS = 0.2
"""Time after which it is looked whether the job is to stop, where nothing happens."""
LONGEST_REASON = 400
"""Characters of why a worker has died."""


class WorkerPool:
    """The workers, and the model that they hold. Nothing is started before something is asked of it."""

    def __init__(
        self,
        crew: WorkerBackend,
        order: LoadRequest,
        *,
        tokenizer: "PreTrainedTokenizerFast",
        workers: int,
        timeout_seconds: float,
    ) -> None:
        """`workers` are to hold what is in the `order`; one that does nothing for so long is given up.

        With the `tokenizer`, this process makes the prompts.
        """
        self.crew, self.order, self.tokenizer = crew, order, tokenizer
        self.workers, self.timeout = workers, timeout_seconds
        self.members: dict[int, WorkerState] = {}
        self.known: ModelFacts | None = None
        self.has_begun = False
        """Whether all have been there."""
        self.deaths = 0
        """Since the last row was answered."""
        self.errands = 0
        self.offered: Offer | None = None

    # What is told of the model

    @cached_property
    def facts(self) -> ModelFacts:
        """What a worker tells of the model."""
        self.start()
        assert self.known is not None
        return self.known

    @property
    def fingerprint(self) -> str:
        """What the model is; the same as in one process on such a device."""
        return self.facts.fingerprint

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens."""
        return self.facts.context_length

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """What the checkpoint's generation_config.json says."""
        return self.facts.checkpoint_generation

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Why rows of up to so many tokens cannot be answered in slots; None where they can."""
        found: str | None = self.ask("why_no_slots", options, tokens=tokens)[0]
        return found

    def batch_way(self, options: GenerationOptions, *, tokens: int) -> BatchWay:
        """Return which rows of up to `tokens` tokens can be answered in one batch."""
        found: BatchWay = self.ask("batch_way", options, tokens=tokens)[0]
        return found

    def offer(
        self,
        options: GenerationOptions,
        *,
        lengths: npt.NDArray[np.integer],
        shared_tokens: int,
        rows: int | None,
        max_new_tokens: int,
    ) -> Offer:
        """How many rows are answered at a time: each worker finds what it holds, and the smallest counts for all."""
        offers: list[Offer] = self.ask(
            "offer",
            options,
            lengths=lengths,
            shared_tokens=shared_tokens,
            rows=rows,
            max_new_tokens=max_new_tokens,
        )
        self.offered = min(offers, key=lambda offer: offer.size.rows)
        sizes = sorted(offer.size.rows for offer in offers)
        if sizes[0] != sizes[-1]:
            logger.info("workers hold %s to %s rows at a time; all get %s", sizes[0], sizes[-1], sizes[0])
        return self.offered

    # Answers

    def completions(
        self,
        work: RowRequests,
        options: GenerationOptions,
        *,
        engine: str,
        max_new_tokens: int,
        batch_size: int,
        room_tokens: int | None,
        seed: int,
        left: npt.NDArray[np.bool_],
        stopping: Callable[[], bool],
    ) -> Iterator[BatchResult]:
        """Answers of the rows that are `left` [rows], as they come.

        Once it is `stopping`, workers end the rows that they have begun. Raises what a worker fails with, and
        JobError where workers die one after the other: what was handed on before is complete.
        """
        plan: WorkPlan
        if engine == "slots":
            plan = RowWorkPlan(work, left)
        else:
            way = way_for(self, work.lengths, work.new_tokens, options=options)
            plan = BatchWorkPlan(work, left, batch_size=batch_size, way=way)
        if not plan.total:
            return
        self.start()
        self.errands += 1
        errand = WorkerJob(
            number=self.errands,
            engine=engine,
            options=options,
            max_new_tokens=max_new_tokens,
            seed=seed,
            rows=len(left),
            batch_size=batch_size,
            size=self.offered.size if self.offered is not None else None,
            room_tokens=room_tokens,
            prefix=list(plan.prefix),
        )
        job = WorkerPoolJob(self, plan, errand)
        try:
            yield from job.completions(stopping)
        finally:
            # Of a job that was left in the middle: what they are at would go on.
            for member in self.working():
                self.stop(member)

    # Workers

    def start(self) -> None:
        """Have the workers, with the model in memory. Raises JobError where some do not come.

        All are waited for at first; those that take the place of dead ones only where no other is left.
        """
        while not self.ready() or not (self.has_begun or len(self.ready()) == self.workers):
            self.fill()
            for event in self.poll():
                self.handle_event(event)
            self.check_timeouts()
        self.has_begun = True

    def fill(self) -> None:
        """Hire as many workers as there are to be."""
        while len(self.members) < self.workers:
            number = self.crew.start()
            self.members[number] = WorkerState(number)

    def lose(self, member: WorkerState, reason: str, *, rows: int = 0) -> None:
        """A worker is gone, which had so many rows. Raises JobError where that happens time after time."""
        self.stop(member)
        self.deaths += 1
        logger.debug("%s: %s", described(member), reason)
        if self.deaths >= MOST_DEATHS:
            raise JobError(
                f"{self.deaths} workers have died one after the other without answering a row, the last one "
                f"({described(member)}) so: {clipped(reason, most=LONGEST_REASON)}. Answers up to here are kept; see "
                "whether the machine has the memory for it, and start the same command again to go on"
            )
        dealt = f", and what it had is dealt again: {counted(rows, 'row')}" if rows else ""
        logger.warning("%s is gone; another one takes its place%s", described(member), dealt)

    def stop(self, member: WorkerState) -> None:
        """End a worker."""
        self.crew.stop(member.number)
        self.members.pop(member.number, None)

    def ready(self) -> list[WorkerState]:
        """Workers that wait for an errand."""
        return [member for member in self.members.values() if member.state == "ready"]

    def working(self) -> list[WorkerState]:
        """Workers on an errand."""
        return [member for member in self.members.values() if member.state == "working"]

    def ask(self, method: str, *given: Any, **named: Any) -> list[Any]:
        """What the method comes to on each worker that is ready, of those that live to tell it; at least one."""
        found: list[Any] = []
        with self.asking():
            while not found:
                self.start()
                asked = self.ready()
                for member in asked:
                    self.crew.ask(member.number, method, *given, **named)
                    member.state, member.heard = "asked", time.monotonic()
                while any(member.state == "asked" for member in self.members.values()):
                    for event in self.poll():
                        if isinstance(event, WorkerReplied) and event.method == method:
                            found.append(event.value)
                            self.members[event.worker].state = "ready"
                        else:
                            self.handle_event(event)
                    self.check_timeouts()
        return found

    def each(self, method: str, tasks: Iterable[Any], **named: Any) -> list[Any]:
        """What the method comes to on each task, in their order: whoever is ready takes the next one."""
        found: dict[int, Any] = {}
        numbered, given = enumerate(tasks), dict[int, tuple[int, Any]]()
        left: list[tuple[int, Any]] = []
        """Tasks of workers that have died."""
        more = True
        with self.asking():
            while more or left or given:
                self.fill()
                for member in self.ready():
                    task = left.pop() if left else next(numbered, None)
                    if task is None:
                        more = False
                        break
                    given[member.number] = task
                    self.crew.ask(member.number, method, task[1], **named)
                    member.state, member.heard = "asked", time.monotonic()
                for event in self.poll() if given or not self.ready() else ():
                    if isinstance(event, WorkerReplied) and event.method == method:
                        found[given.pop(event.worker)[0]] = event.value
                        self.members[event.worker].state, self.deaths = "ready", 0
                        continue
                    if isinstance(event, WorkerLost) and event.worker in given:
                        left.append(given.pop(event.worker))
                    self.handle_event(event)
                self.check_timeouts()
        return [found[place] for place in sorted(found)]

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around questions: where they are given up in the middle, so are the workers that are at them."""
        try:
            yield
        finally:
            for member in [member for member in self.members.values() if member.state == "asked"]:
                self.stop(member)

    def poll(self) -> Iterator[Event]:
        """What has happened to workers since; nothing of those that are dismissed in between."""
        for event in self.crew.events(GLANCE_SECONDS):
            member = self.members.get(event.worker)
            if member is not None:
                member.heard = time.monotonic()
                yield event

    def handle_event(self, event: Event) -> None:
        """Know what has become of a worker. Raises what it has failed with."""
        member = self.members[event.worker]
        match event:
            case WorkerFailed():
                self.stop(member)
                raise event.error
            case WorkerLost():
                self.lose(member, event.reason)
            case WorkerReplied(method="where"):
                member.place, member.state = event.value, "placed"
            case WorkerReplied(method="load"):
                self.check_same(event.value)
                member.state = "ready"
            case WorkerReported(found=LogMessage() as remark):
                logger.log(remark.level, "%s: %s", described(member), remark.text)
            case _:
                raise AssertionError(f"nobody waits for {event}")
        self.load()

    def load(self) -> None:
        """Have workers load the model whose machine is known; at first once that is known of all.

        Those of a machine share its memory and its cores.
        """
        if self.known is None and any(member.state == "starting" for member in self.members.values()):
            return
        for member in [member for member in self.members.values() if member.state == "placed"]:
            node = [other.number for other in self.members.values() if other.node == member.node]
            self.crew.ask(
                member.number,
                "load",
                self.order,
                local_rank=node.index(member.number),
                local_ranks=len(node),
            )
            member.state = "loading"

    def check_same(self, facts: ModelFacts) -> None:
        """Raises JobError where a worker has another model than those before it."""
        if self.known is not None and self.known != facts:
            raise JobError(
                f"the workers do not have the same model ({self.known.fingerprint} and {facts.fingerprint}): their "
                "devices or the files that they see differ; let them run on machines of one kind"
            )
        self.known = facts

    def check_timeouts(self) -> None:
        """Raises JobError where no worker is at work, and one that is waited for does not come."""
        silent = [member for member in self.members.values() if self.is_silent(member)]
        if silent and not self.working():
            states = [member.state for member in self.members.values()]
            there = len(states) - states.count("starting")
            told = ", ".join(f"{amount:g} {name}" for name, amount in self.crew.resources().items())
            raise JobError(
                f"{there} of {self.workers} workers have started, and {described(silent[0])} has not answered for "
                f"{self.timeout:,.0f} s (backend.timeout_seconds). In all there are {told or 'no machines'}: write a "
                "smaller backend.workers, add machines, or write a longer time"
            )

    def is_silent(self, member: WorkerState) -> bool:
        """Whether something is waited for from this worker, and for too long."""
        return member.state != "ready" and time.monotonic() - member.heard > self.timeout
