"""A rank that another program starts, in a thread of its process: what it reports, and how it is asked to stop.

The process of the command shows the rank's logs and progress as its own. A rank receives no signals: it polls whether
it should stop, and then stops as on Ctrl-C.
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

from partita.backends.ray.event_queue import (
    LogMessage,
    Message,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankFinished,
    RankStarted,
)
from partita.distributed.init import available_cores, own_threads
from partita.distributed.world import FAILURE_GRACE_SECONDS, get_world
from partita.runs.log import show_log
from partita.runs.progress import shown_by
from partita_schema.common.text import describe_error
from partita_schema.errors import OtherRankError
from partita_trainers.interrupt import ask_to_stop

T = TypeVar("T")

ASK_SECONDS = 0.5
"""Interval between polls of the stop flag."""
SEND_SECONDS = 0.2
"""Interval in which updates of a progress display are merged into one message."""


PACKAGES = ("partita", "partita_trainers", "partita_schema")
"""Loggers whose records are forwarded."""
SendMessage = Callable[[Message], None]


class RankEndedError(Exception):
    """A rank failed and has reported why."""


def run_rank(
    work: Callable[[], Any], *, send: SendMessage, is_stopping: Callable[[], bool], threads: str, quiet: bool
) -> None:
    """Run `work` as the rank that the environment variables describe, and report its start, progress and end.

    Args:
        work: Returns the result of the rank.
        send: Sends a message to the process of the command.
        is_stopping: Returns whether to stop.
        threads: OMP_NUM_THREADS of the command, "" if unset.
        quiet: Whether to report less log output.

    Raises:
        RankEndedError: The work failed.
    """
    world = get_world()
    send(RankStarted(world.rank, world.world_size, world.node, os.getpid()))
    take_own_devices(threads)
    forward_logs(send, rank=world.rank, quiet=quiet)
    try:
        with stopped_by(is_stopping), shown_by(Displays(send).show):
            result = work()
    except BaseException as error:
        send(RankFinished(picklable_error(error)))
        if isinstance(error, OtherRankError):
            time.sleep(FAILURE_GRACE_SECONDS)
        raise RankEndedError(describe_error(error)) from None
    send(RankFinished(None, result))


def take_own_devices(threads: str) -> None:
    """Undo Ray's changes to the environment, so that threads and device follow from the local rank as elsewhere."""
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads:
        os.environ["OMP_NUM_THREADS"] = threads
    torch.set_num_threads(own_threads(get_world(), cores=available_cores(), environment=dict(os.environ)))


def picklable_error(error: BaseException) -> BaseException:
    """Return the error with its traceback as a note, in a picklable form."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    lines = "".join(traceback.format_exception(error))
    world = get_world()
    try:
        picklable: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # error classes may raise anything when unpickled
        picklable = RuntimeError(describe_error(error))
    picklable.add_note(f"raised in rank {world.rank} on {world.node}:\n{lines}")
    return picklable


# Logs and progress


class LogForwarder(logging.Handler):
    """Forwards log records as messages."""

    def __init__(self, send: Callable[[LogMessage], None], level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record."""
        self.send(LogMessage(record.name, record.levelno, self.format(record)))


def forward_logs(send: SendMessage, *, rank: int, quiet: bool) -> None:
    """Forward the logs of partita's packages that `show_log` would show on this rank."""
    show_log(quiet=quiet, rank=rank)
    for name in PACKAGES:
        logger, forwarder = logging.getLogger(name), LogForwarder(send)
        forwarder.setFormatter(logger.handlers[0].formatter)
        logger.handlers = [forwarder]
    logging.getLogger("partita.file").setLevel(logging.ERROR)  # the process of the command has logged it


class Displays:
    """The progress displays of a rank."""

    def __init__(self, send: SendMessage) -> None:
        self.send = send
        self.opened = 0

    @contextmanager
    def show(self, total: int, description: str, *, completed: int = 0) -> Iterator["Display"]:
        """Open a display, as `partita.runs.progress.show_progress` does."""
        self.opened += 1
        display = Display(self.opened, self.send)
        self.send(ProgressOpened(display.number, total, description, completed))
        try:
            yield display
        finally:
            display.flush()
            self.send(ProgressClosed(display.number))


class Display:
    """A progress display that sends its updates a few times per second."""

    def __init__(self, number: int, send: SendMessage) -> None:
        self.number, self.send = number, send
        self.amount = 0
        self.shown: Mapping[str, Any] = {}
        self.sent_at = time.monotonic()

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Advance the display."""
        self.amount += amount
        self.shown = shown or self.shown
        if time.monotonic() - self.sent_at >= SEND_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send pending updates."""
        if self.amount:
            self.send(ProgressMoved(self.number, self.amount, self.shown))
            self.amount, self.sent_at = 0, time.monotonic()


# Stopping


@contextmanager
def stopped_by(is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Stop the thread inside the context when `is_stopping` returns true; after its step, if it takes steps."""
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
    """Raise KeyboardInterrupt in a thread as soon as it runs Python code again, as a signal does in the main thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
