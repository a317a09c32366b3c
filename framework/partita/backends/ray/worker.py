"""An inference worker process: it holds the model and answers the rows it receives until the job ends.

Rows arrive while others are being answered, so that a free slot is filled at once and no row waits for a whole batch.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from partita.backends.ray.event_queue import LogMessage
from partita.backends.ray.messages import LoadRequest, ModelFacts, Offer, WorkerJob, WorkerLocation
from partita.backends.ray.rank import PACKAGES, LogForwarder
from partita.backends.ray.work_items import WorkItem
from partita.distributed.init import available_cores, own_threads
from partita.distributed.world import DistributedEnv
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import BatchResult, GenerationSettings, RowRequests
from partita.generation.scheduler import Scheduler
from partita.generation.static_batches import StaticBatch
from partita.lm.base import BatchSupport, GenerationOptions, GenerativeModel
from partita.lm.load_model import load_model
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import head_of
from partita.pipeline.dataset_loss import BatchLoss, batch_loss
from partita.runs.log import show_log
from partita.tokenizers.load import load_tokenizer
from partita_schema.config import Config
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.objective import Objective, ObjectiveContext
from partita_trainers.process_group import SingleProcess

NO_OPTIONS = GenerationOptions({})
"""Options for work that generates nothing."""


class SharedMachine(SingleProcess):
    """A process group of one that shares memory and cores with other processes on its machine."""

    def __init__(self, local_ranks: int) -> None:
        self.local_world_size = local_ranks


@dataclass(frozen=True)
class GenerationModel:
    """A model and its generation settings: everything that batch sizes depend on."""

    config: Config
    folder: Path
    lm: GenerativeModel
    generation: GenerationOptions
    max_new_tokens: int


class Worker:
    """One inference process. `add_rows` and `end` are called in another thread while it answers."""

    def __init__(self) -> None:
        """Create the worker; loads nothing yet."""
        self.inbox = Inbox(0)
        self.changing = threading.Lock()
        self.log_messages: deque[LogMessage] = deque()
        listen(self.log_messages)
        self._tuner: BatchSizeTuner | None = None

    def where(self) -> WorkerLocation:
        """Return the host name and process id."""
        return WorkerLocation(os.uname().nodename, os.getpid())

    def load(self, order: LoadRequest, *, local_rank: int, local_ranks: int) -> ModelFacts:
        """Load the model as worker `local_rank` of `local_ranks` on this machine. Raises any error of loading."""
        world = DistributedEnv(local_rank, local_ranks, local_rank, local_ranks)
        threads = own_threads(world, cores=available_cores(), environment={"OMP_NUM_THREADS": order.threads})
        torch.set_num_threads(threads)
        self.order, self.machine_group = order, SharedMachine(local_ranks)
        tokenizer = order.tokenizer
        if tokenizer is None:
            tokenizer = load_tokenizer(order.config, folder=order.folder, texts=tuple, saved=order.saved)
        self.lm = lm = load_model(
            order.config,
            folder=order.folder,
            tokenizer=tokenizer,
            saved=order.saved,
            trainable=False,
            head=head_of(order.config, order.labels),
        )
        head_labels = None if lm.head is None else lm.head.labels
        return ModelFacts(
            lm.fingerprint,
            lm.context_length,
            lm.answer_context,
            lm.checkpoint_generation,
            lm.vocabulary_size,
            head_labels,
        )

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot be answered in slots; None if they can."""
        return self.lm.why_no_slots(options, tokens=tokens)

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows of up to `tokens` tokens can be answered in one batch."""
        return self.lm.batch_support(options, tokens=tokens)

    def offer(
        self,
        options: GenerationOptions,
        *,
        lengths: np.ndarray,
        shared_tokens: int,
        batch_size: int | None,
        max_new_tokens: int,
    ) -> Offer:
        """Return the best batch size for generation on this worker, as found by `BatchSizeTuner.generation`.

        Args:
            options: Generation options.
            lengths: Prompt tokens of each row, 0 for rows that are not requested.
            shared_tokens: Tokens of the prefix that all prompts share.
            batch_size: Batch size that overrides the configured one, or None.
            max_new_tokens: Maximum new tokens of a row.
        """
        tuner = self.tuner(options, max_new_tokens)
        size = tuner.generation(lengths, shared_tokens=shared_tokens, batch_size=batch_size)
        return Offer(size, tuner.budget("generation", size).token_budget)

    def evaluation_size(
        self, lengths: np.ndarray, max_loss_tokens: int, *, batch_size: int | None, objective: Objective
    ) -> BatchSize:
        """Return the batch size for evaluation on this worker.

        Args:
            lengths: Length of each row in tokens.
            max_loss_tokens: Maximum number of loss tokens of a row.
            batch_size: Size set by the caller; None to measure.
            objective: What is computed.
        """
        tuner = self.tuner(NO_OPTIONS, 1)
        return tuner.evaluation(lengths, max_loss_tokens, batch_size=batch_size, objective=objective)

    def loss(self, task: tuple[Batch, Objective], *, size: BatchSize) -> BatchLoss:
        """Return the sums of an objective over a batch. Raises ModelError if a single row does not fit."""
        batch, objective = task
        with self.tuner(NO_OPTIONS, 1).work("evaluation", size) as budget, torch.no_grad():
            self.lm.module.eval()
            context = ObjectiveContext(self.lm, self.lm.module)
            return batch_loss(objective, context, batch, budget=budget)

    def answer(self, worker_job: WorkerJob) -> Iterator[BatchResult | LogMessage]:
        """Yield results of the received rows and log messages until the job is ended."""
        tuner = self.tuner(worker_job.options, worker_job.max_new_tokens)
        size = worker_job.size or BatchSize(rows=worker_job.batch_size, origin="file", device=str(self.lm.device))
        budget = BatchBudget(worker_job.batch_size)
        if size.rows == worker_job.batch_size:
            budget = tuner.budget("generation", size)
        budget.token_budget = worker_job.token_budget
        work = self.in_slots if worker_job.engine == "slots" else self.in_batches
        with tuner.guard(size):
            for batch in work(worker_job, self.inbox_of(worker_job.number), budget):
                yield from self.take_log_messages()
                yield batch
        tuner.after(BatchSizes(generation=size))
        yield from self.take_log_messages()

    def add_rows(self, number: int, work_items: Sequence[WorkItem]) -> None:
        """Receive more rows for job `number`."""
        self.inbox_of(number).put(work_items)

    def end(self, number: int, *, now: bool) -> None:
        """Receive no more rows for job `number`; with `now`, drop rows that have not started."""
        self.inbox_of(number).end(now=now)

    # Running a job

    def inbox_of(self, number: int) -> "Inbox":
        """Return the inbox of a job; its first message may arrive before the job starts."""
        with self.changing:
            if number > self.inbox.number:
                self.inbox = Inbox(number)
            return self.inbox if number == self.inbox.number else Inbox(number)  # rows of a finished job are dropped

    def in_slots(self, worker_job: WorkerJob, inbox: "Inbox", budget: BatchBudget) -> Iterator[BatchResult]:
        """Answer rows in slots, which stay open while there are rows."""
        rows = ReceivedRows(inbox, worker_job.rows)
        work = RowRequests(
            rows.lengths,
            rows.new_tokens,
            fetch=rows.fetch,
            key=rows.key,
            prefix=worker_job.prefix,
            num_samples=worker_job.num_samples,
            prefix_groups=worker_job.prefix_groups,
        )
        while inbox.wait():
            settings = GenerationSettings(
                worker_job.options, budget, worker_job.seed, stopping=lambda: inbox.is_cancelled
            )
            run = Scheduler(self.lm, work, settings, rows=rows)
            for batch in run.completions():
                rows.forget(result.row for result in batch.results)
                yield batch

    def in_batches(self, worker_job: WorkerJob, inbox: "Inbox", budget: BatchBudget) -> Iterator[BatchResult]:
        """Answer sorted batches one after the other."""
        settings = GenerationSettings(worker_job.options, budget, worker_job.seed)
        while inbox.wait():
            work_item = inbox.next()
            prompts = dict(zip(work_item.rows, work_item.prompts, strict=True))
            keys = dict(zip(work_item.rows, work_item.keys, strict=True))
            yield from StaticBatch(
                self.lm,
                settings,
                partial(select_prompts, prompts),
                keys.__getitem__,
                rows=np.array(work_item.rows),
                lengths=np.array([len(ids) for ids in work_item.prompts]),
                new_tokens=np.array(work_item.new_tokens),
                wanted=np.array(work_item.wanted),
            ).generate()

    def tuner(self, options: GenerationOptions, max_new_tokens: int) -> BatchSizeTuner:
        """Return the tuner that finds batch sizes and guards memory; reused while model and options do not change."""
        pipeline = GenerationModel(self.order.config, self.order.folder, self.lm, options, max_new_tokens)
        if self._tuner is None or self._tuner.pipeline != pipeline:
            self._tuner = BatchSizeTuner(pipeline, process_group=self.machine_group)
        return self._tuner

    def take_log_messages(self) -> Iterator[LogMessage]:
        """Yield the log messages since the last call."""
        while self.log_messages:
            yield self.log_messages.popleft()


class Inbox:
    """Received rows of a job that have not started. One thread puts, another one takes."""

    def __init__(self, number: int) -> None:
        """`number` identifies the job."""
        self.number = number
        self.work_items: deque[WorkItem] = deque()
        self.changed = threading.Condition()
        self.is_ended = False
        self.is_cancelled = False
        """Whether to drop rows that have not started."""

    def put(self, work_items: Sequence[WorkItem]) -> None:
        """Add received rows."""
        with self.changed:
            self.work_items += work_items
            self.changed.notify()

    def end(self, *, now: bool) -> None:
        """Receive no more rows; with `now`, take no more either."""
        with self.changed:
            self.is_ended, self.is_cancelled = True, self.is_cancelled or now
            self.changed.notify()

    def wait(self) -> bool:
        """Wait for rows to take; return False if there will be none."""
        with self.changed:
            self.changed.wait_for(lambda: self.work_items or self.is_ended)
            return bool(self.work_items) and not self.is_cancelled

    def next(self) -> WorkItem:
        """Return the first work item; call `wait` first."""
        with self.changed:
            return self.work_items.popleft()

    def take(self) -> list[WorkItem]:
        """Return all work items, possibly none."""
        with self.changed:
            taken = list(self.work_items)
            self.work_items.clear()
            return taken


class ReceivedRows:
    """Received rows as a source for the slots; lengths of a row are known after it was taken."""

    left = True

    def __init__(self, inbox: Inbox, rows: int) -> None:
        """`rows` is the number of rows in the data."""
        self.inbox = inbox
        # Pages are allocated when written to: a worker sees only a part of the rows.
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.new_tokens = np.zeros(rows, dtype=np.int32)
        self.known: dict[int, tuple[list[int], bytes]] = {}

    def take(self, wanted: int) -> list[int]:
        """Return all received rows, even more than requested: they belong to this worker only."""
        taken = []
        for work_item in self.inbox.take():
            for row, ids, new_tokens, key in zip(
                work_item.rows, work_item.prompts, work_item.new_tokens, work_item.keys, strict=True
            ):
                self.lengths[row], self.new_tokens[row] = len(ids), new_tokens
                self.known[row] = ids, key
                taken.append(row)
        return taken

    def fetch(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the prompt tokens of rows."""
        return [self.known[row][0] for row in rows]

    def key(self, row: int) -> bytes:
        """Return the key that seeds a row's random numbers."""
        return self.known[row][1]

    def forget(self, rows: Iterable[int]) -> None:
        """Remove answered rows."""
        for row in rows:
            del self.known[row]


def listen(log_messages: deque[LogMessage]) -> None:
    """Collect the warnings of partita's packages, and keep other log output off the screen."""
    show_log(quiet=True)
    for name in PACKAGES:
        logging.getLogger(name).handlers = [LogForwarder(log_messages.append, logging.WARNING)]


def select_prompts(prompts: Mapping[int, list[int]], rows: Sequence[int]) -> list[list[int]]:
    """Return the prompts of rows, in order."""
    return [prompts[row] for row in rows]
