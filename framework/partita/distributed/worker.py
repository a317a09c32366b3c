"""A process of a fleet: it holds the model and answers what it is handed, until it is told that this was all.

Rows come while others are answered: a slot that is free is filled at once, and nobody waits for the end of a batch.
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

from partita.distributed.init import available_cores, own_threads
from partita.distributed.world import World
from partita.evaluation import batch_loss
from partita.inference.fleet.messages import LoadRequest, LogMessage, ModelFacts, Offer, WorkerJob, WorkerLocation
from partita.inference.fleet.work_items import WorkItem
from partita.inference.oom_backoff import BatchLimit
from partita.inference.results import BatchResult
from partita.inference.scheduler import RowRequests, Scheduler
from partita.inference.static_batches import StaticBatch
from partita.lm.base import BatchWay, GenerationOptions, GenerativeModel
from partita.lm.huggingface import load_model
from partita.lm.tokenizers import load_tokenizer
from partita.logs import show_log
from partita.tuning.sizes import BatchSizes, BatchSizeTuner
from partita_schema.config import Config
from partita_trainers.base import Batch
from partita_trainers.batch_size.cache import Cache
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import SingleProcess

NO_OPTIONS = GenerationOptions({})
"""Where nothing is generated."""


class SharedMachine(SingleProcess):
    """A team of one, among other processes of its machine with which it shares memory and cores."""

    def __init__(self, local_ranks: int) -> None:
        self.local_world_size = local_ranks


@dataclass(frozen=True)
class GenerationModel:
    """What answers, and how: all that batch sizes hang on."""

    config: Config
    folder: Path
    lm: GenerativeModel
    generation: GenerationOptions
    max_new_tokens: int


class Worker:
    """One process of a fleet. While it answers, `hand` and `end` are called in another thread."""

    def __init__(self) -> None:
        """Loads nothing yet."""
        self.mail = Mail(0)
        self.changing = threading.Lock()
        self.remarks: deque[LogMessage] = deque()
        listen(self.remarks)
        self.kept: BatchSizeTuner | None = None

    def where(self) -> WorkerLocation:
        """This process, and its machine."""
        return WorkerLocation(os.uname().nodename, os.getpid())

    def load(self, order: LoadRequest, *, local_rank: int, local_ranks: int) -> ModelFacts:
        """Load the model, as one of so many workers on this machine. Raises what that raises."""
        place = World(local_rank, local_ranks, local_rank, local_ranks)
        threads = own_threads(place, cores=available_cores(), environment={"OMP_NUM_THREADS": order.threads})
        torch.set_num_threads(threads)
        self.order, self.neighbours = order, SharedMachine(local_ranks)
        tokenizer = order.tokenizer
        if tokenizer is None:
            tokenizer = load_tokenizer(order.config, folder=order.folder, texts=tuple, saved=order.saved)
        self.lm = load_model(order.config, folder=order.folder, tokenizer=tokenizer, saved=order.saved, trainable=False)
        return ModelFacts(self.lm.fingerprint, self.lm.context_length, self.lm.checkpoint_generation)

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Why rows of up to so many tokens cannot be answered in slots; None where they can."""
        return self.lm.why_no_slots(options, tokens=tokens)

    def batch_way(self, options: GenerationOptions, *, tokens: int) -> BatchWay:
        """Return which rows of up to `tokens` tokens can be answered in one batch."""
        return self.lm.batch_way(options, tokens=tokens)

    def offer(
        self,
        options: GenerationOptions,
        *,
        lengths: np.ndarray,
        shared_tokens: int,
        rows: int | None,
        max_new_tokens: int,
    ) -> Offer:
        """How many rows are best answered here at a time: as `BatchSizeTuner.generation` finds it."""
        sizing = self.sizing(options, max_new_tokens)
        size = sizing.generation(lengths, shared_tokens=shared_tokens, rows=rows)
        return Offer(size, sizing.capacity("generation", size).room_tokens)

    def evaluation_size(self, lengths: np.ndarray, most_learned: int, *, rows: int | None) -> BatchSize:
        """What `BatchSizeTuner.evaluation` finds here."""
        return self.sizing(NO_OPTIONS, 1).evaluation(lengths, most_learned, rows=rows)

    def loss(self, batch: Batch, *, size: BatchSize) -> float:
        """Sum of the cross-entropy over the batch's loss tokens. Raises ModelError where a row does not fit alone."""
        with self.sizing(NO_OPTIONS, 1).work("evaluation", size) as capacity, torch.no_grad():
            self.lm.module.eval()
            return batch_loss(self.lm, batch, limit=capacity.limit)

    def answer(self, errand: WorkerJob) -> Iterator[BatchResult | LogMessage]:
        """Results of what is handed to this worker, as they come, until the end is told; with what there is to say."""
        sizing = self.sizing(errand.options, errand.max_new_tokens)
        size = errand.size or BatchSize(rows=errand.batch_size, origin="file", device=str(self.lm.device))
        limit = sizing.limit("generation", size) if size.rows == errand.batch_size else BatchLimit(errand.batch_size)
        work = self.in_slots if errand.engine == "slots" else self.in_batches
        with sizing.guard(size):
            for batch in work(errand, self.mail_of(errand.number), limit):
                yield from self.said()
                yield batch
        sizing.after(BatchSizes(generation=size))
        yield from self.said()

    def hand(self, number: int, parcels: Sequence[WorkItem]) -> None:
        """More to answer, of the errand with this number."""
        self.mail_of(number).put(parcels)

    def end(self, number: int, *, now: bool) -> None:
        """No more will come; with `now`, what was not begun is left."""
        self.mail_of(number).end(now=now)

    # What it does

    def mail_of(self, number: int) -> "Mail":
        """What comes for an errand; its first message may be here before it is begun."""
        with self.changing:
            if number > self.mail.number:
                self.mail = Mail(number)
            return self.mail if number == self.mail.number else Mail(number)  # nobody waits for an errand that is over

    def in_slots(self, errand: WorkerJob, mail: "Mail", limit: BatchLimit) -> Iterator[BatchResult]:
        """Rows in slots, which stay open as long as there are any."""
        rows = HandedRows(mail, errand.rows)
        work = RowRequests(rows.lengths, rows.new_tokens, fetch=rows.fetch, key=rows.key, prefix=errand.prefix)
        while mail.wait():
            run = Scheduler(
                self.lm,
                work,
                errand.options,
                slots=errand.batch_size,
                seed=errand.seed,
                left=np.zeros(errand.rows, dtype=np.bool_),
                limit=limit,
                room_tokens=errand.room_tokens,
                stopping=lambda: mail.is_left_alone,
                source=rows,
            )
            for batch in run.completions():
                rows.forget(result.row for result in batch.results)
                yield batch

    def in_batches(self, errand: WorkerJob, mail: "Mail", limit: BatchLimit) -> Iterator[BatchResult]:
        """Sorted batches, one after the other."""
        while mail.wait():
            parcel = mail.next()
            prompts = dict(zip(parcel.rows, parcel.prompts, strict=True))
            keys = dict(zip(parcel.rows, parcel.keys, strict=True))
            yield from StaticBatch(
                self.lm,
                partial(chosen, prompts),
                errand.options,
                rows=np.array(parcel.rows),
                lengths=np.array([len(ids) for ids in parcel.prompts]),
                new_tokens=np.array(parcel.new_tokens),
                wanted=np.array(parcel.max_new_tokens),
                key=keys.__getitem__,
                seed=errand.seed,
                limit=limit,
            ).generate()

    def sizing(self, options: GenerationOptions, max_new_tokens: int) -> BatchSizeTuner:
        """What finds sizes and guards memory for such answers; the same as long as they stay the same."""
        wanted = GenerationModel(self.order.config, self.order.folder, self.lm, options, max_new_tokens)
        if self.kept is None or self.kept.pipeline != wanted:
            self.kept = BatchSizeTuner(wanted, cache=Cache.of_user(), process_group=self.neighbours)
        return self.kept

    def said(self) -> Iterator[LogMessage]:
        """What was logged since the last time."""
        while self.remarks:
            yield self.remarks.popleft()


class Mail:
    """What has come for an errand and is not begun. One thread puts, another one takes."""

    def __init__(self, number: int) -> None:
        """`number` is the errand's."""
        self.number = number
        self.parcels: deque[WorkItem] = deque()
        self.changed = threading.Condition()
        self.is_ended = False
        self.is_left_alone = False
        """Whether what was not begun is to be left."""

    def put(self, parcels: Sequence[WorkItem]) -> None:
        """Add what has come."""
        with self.changed:
            self.parcels += parcels
            self.changed.notify()

    def end(self, *, now: bool) -> None:
        """Nothing more comes; with `now`, nothing more is taken."""
        with self.changed:
            self.is_ended, self.is_left_alone = True, self.is_left_alone or now
            self.changed.notify()

    def wait(self) -> bool:
        """Wait for something to take; False where nothing comes any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.parcels or self.is_ended)
            return bool(self.parcels) and not self.is_left_alone

    def next(self) -> WorkItem:
        """The first parcel; only after `wait`."""
        with self.changed:
            return self.parcels.popleft()

    def take(self) -> list[WorkItem]:
        """All that is there, which may be nothing."""
        with self.changed:
            taken = list(self.parcels)
            self.parcels.clear()
            return taken


class HandedRows:
    """Rows as they come, for the slots; what they need to know of a row is known from then on."""

    left = True

    def __init__(self, mail: Mail, rows: int) -> None:
        """`rows` is their number in the data."""
        self.mail = mail
        # Not in memory before they are written to: a worker sees a part of the rows.
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.new_tokens = np.zeros(rows, dtype=np.int32)
        self.known: dict[int, tuple[list[int], bytes]] = {}

    def take(self, wanted: int) -> list[int]:
        """All rows that have come, also more than wanted: none of them is another worker's."""
        taken = []
        for parcel in self.mail.take():
            for row, ids, new_tokens, key in zip(
                parcel.rows, parcel.prompts, parcel.new_tokens, parcel.keys, strict=True
            ):
                self.lengths[row], self.new_tokens[row] = len(ids), new_tokens
                self.known[row] = ids, key
                taken.append(row)
        return taken

    def fetch(self, rows: Sequence[int]) -> list[list[int]]:
        """The tokens of prompts."""
        return [self.known[row][0] for row in rows]

    def key(self, row: int) -> bytes:
        """What a row's random numbers follow from."""
        return self.known[row][1]

    def forget(self, rows: Iterable[int]) -> None:
        """These rows are answered."""
        for row in rows:
            del self.known[row]


class Listener(logging.Handler):
    """Keeps what is logged as a warning, for the process that people look at."""

    def __init__(self, remarks: deque[LogMessage]) -> None:
        super().__init__(logging.WARNING)
        self.remarks = remarks

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.remarks.append(LogMessage(record.levelno, record.getMessage()))


def listen(remarks: deque[LogMessage]) -> None:
    """Keep the warnings of partita's packages, and the libraries' chatter off the screen."""
    show_log(quiet=True)
    for name in ("partita", "partita_trainers", "partita_schema"):
        logging.getLogger(name).handlers = [Listener(remarks)]


def chosen(prompts: Mapping[int, list[int]], rows: Sequence[int]) -> list[list[int]]:
    """The prompts of rows, in order."""
    return [prompts[row] for row in rows]
