"""A rank that somebody else starts, in a thread of its process: what it tells, and how it hears that it is to stop.

The process of the command shows what is told here, as if it had been there. No signal comes to a rank: it asks whether
it is to stop, and stops as by Ctrl-C.
"""

import ctypes
import logging
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from partita.distributed.event_queue import (
    Message,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankFinished,
    RankLogged,
    RankStarted,
)
from partita.distributed.init import available_cores, own_threads
from partita.distributed.world import get_world
from partita.logs import show_log
from partita.runs.progress import shown_by
from partita_schema.errors import OtherRankError
from partita_trainers.interrupt import ask_to_stop

T = TypeVar("T")

ASK_SECONDS = 0.5
"""Time after which it is asked again whether to stop."""
TELL_SECONDS = 0.2
"""Time that a step of a progress display may wait for the next one, and be told with it."""
LET_IT_END = 5.0
"""Seconds that a rank waits which another one has ended, so that what befell that one is noticed first."""


Tell = Callable[[Message], None]


class RankEndedError(Exception):
    """A rank has ended before its work was done, and has told why."""


def run_rank(
    work: Callable[[], Any], *, tell: Tell, is_stopping: Callable[[], bool], threads: str, quiet: bool
) -> None:
    """Do the work as the rank that the variables of this process tell, and `tell` of it up to its end.

    `threads` is OMP_NUM_THREADS where the command was started. Raises RankEndedError where the work was not done.
    """
    place = get_world()
    tell(RankStarted(place.rank, place.world_size, place.node, os.getpid()))
    take_own_devices(threads)
    say_to(tell, rank=place.rank, quiet=quiet)
    try:
        with stopped_by(is_stopping), shown_by(Displays(tell).show):
            result = work()
    except BaseException as error:
        tell(RankFinished(as_told(error)))
        if isinstance(error, OtherRankError):
            time.sleep(LET_IT_END)
        raise RankEndedError(f"{type(error).__name__}: {error}") from None
    tell(RankFinished(None, result))


def take_own_devices(threads: str) -> None:
    """Undo what Ray has written into the environment: threads and device follow from the place, as everywhere."""
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(own_threads(get_world(), cores=available_cores(), environment=dict(os.environ)))


def as_told(error: BaseException) -> BaseException:
    """The error with its traceback as a note, in a form that reaches another process."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    lines = "".join(traceback.format_exception(error))
    place = get_world()
    try:
        told: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of the error makes of being sent
        told = RuntimeError(f"{type(error).__name__}: {error}")
    told.add_note(f"raised in rank {place.rank} on {place.node}:\n{lines}")
    return told


# What it says and shows


class LogForwarder(logging.Handler):
    """Tells what is logged."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a record."""
        self.tell(RankLogged(record.name, record.levelno, self.format(record)))


def say_to(tell: Tell, *, rank: int, quiet: bool) -> None:
    """Tell what partita's packages log, of what `show_log` would show of it in this rank."""
    show_log(quiet=quiet, rank=rank)
    for name in ("partita", "partita_trainers", "partita_schema"):
        logger, teller = logging.getLogger(name), LogForwarder(tell)
        teller.setFormatter(logger.handlers[0].formatter)
        logger.handlers = [teller]
    logging.getLogger("partita.file").setLevel(logging.ERROR)  # the process of the command has told it


class Displays:
    """The progress displays of a rank."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.opened = 0

    @contextmanager
    def show(self, total: int, description: str, *, completed: int = 0) -> Iterator["Display"]:
        """A display, as `partita.runs.progress.show_progress` has them."""
        self.opened += 1
        display = Display(self.opened, self.tell)
        self.tell(ProgressOpened(display.number, total, description, completed))
        try:
            yield display
        finally:
            display.flush()
            self.tell(ProgressClosed(display.number))


class Display:
    """Tells a few times a second how far it is."""

    def __init__(self, number: int, tell: Tell) -> None:
        self.number, self.tell = number, tell
        self.amount = 0
        self.shown: Mapping[str, Any] = {}
        self.told = time.monotonic()

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on."""
        self.amount += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.told >= TELL_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Tell what was not told yet."""
        if self.amount:
            self.tell(ProgressMoved(self.number, self.amount, self.shown))
            self.amount, self.told = 0, time.monotonic()


# How it hears


@contextmanager
def stopped_by(is_stopping: Callable[[], bool]) -> Iterator[None]:
    """In this context the thread is interrupted once it is to stop, behind its step where it takes steps."""
    changing, left = threading.Lock(), threading.Event()
    thread = threading.get_ident()

    def watch() -> None:
        while not left.wait(ASK_SECONDS):
            if is_stopping():
                with changing:
                    if not left.is_set() and not ask_to_stop():
                        interrupt(thread)
                return

    threading.Thread(target=watch, name="partita-stop", daemon=True).start()
    try:
        yield
    finally:
        with changing:
            left.set()


def interrupt(thread: int) -> None:
    """Raise KeyboardInterrupt in a thread, as a signal does in the first one: behind what it is at in C."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
