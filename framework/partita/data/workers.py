"""Processes that work on chunks, for any number of them the same results in the same order.

What goes in and comes out travels through pipes, so that nothing is left in shared memory however a process ends. It is
pickled here and not by the pool, which loses a process to what cannot be read back and does not say what that was.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from partita_schema.data import LoaderOptions
from partita_schema.errors import DataError
from partita_trainers.interrupt import end_with_parent

Given = TypeVar("Given")
Made = TypeVar("Made")

_work: Callable[[Any], Any]
"""What a worker process does with each chunk; set when it starts."""


@dataclass(frozen=True)
class WorkerFailure:
    """What a chunk ended with in place of a result."""

    error: bytes | None
    """The exception, pickled; None where it would not come out as it went in."""
    said: str
    """Its type and text."""
    trace: str
    """Where it was raised."""

    def exception(self) -> Exception:
        """The exception itself, or a RuntimeError that says all of it."""
        with suppress(Exception):  # a class that only the worker knows; what it said is known
            if self.error is not None:
                error: Exception = pickle.loads(self.error)
                error.__cause__ = InWorker(f"\n{self.trace}")
                return error
        return RuntimeError(f"a data worker raised {self.said}\n{self.trace}")


class InWorker(Exception):  # noqa: N818 -- it says where
    """Where a worker raised what this is the cause of."""


class EncodingWorkers(Generic[Given, Made]):
    """Hands chunks to processes. Without any, a chunk is worked on when its result is asked for."""

    def __init__(self, work: Callable[[Given], Made], options: LoaderOptions) -> None:
        """`work` can be sent to other processes, unless they are forked."""
        self._work = work
        self._timeout = options.timeout
        self.number = options.workers
        self._executor: ProcessPoolExecutor | None = None
        self._finished = time.monotonic()
        if options.workers:
            self._thaws = not gc.get_freeze_count()  # else a program froze what it wants frozen
            gc.freeze()  # looking for garbage among what forked processes share would copy nearly all of it, in each
            self._executor = executor(work, options)
            self._owner = os.getpid()
            # What is let go only when the interpreter ends finds its modules gone.
            atexit.register(self._close_at_exit)

    def submit(self, chunk: Given) -> Callable[[], Made]:
        """Begin with a chunk. What comes back waits for its result.

        That raises what the work raised, and DataError where its process died, or where no process has finished any
        chunk for too long. What the work raised and cannot be pickled is a RuntimeError with its traceback.
        """
        if not self.number:
            return lambda: self._work(chunk)
        assert self._executor is not None, "submit behind close"
        try:
            future = self._executor.submit(run_work, packed(chunk))
        except BrokenProcessPool as error:
            raise self._died(error) from error
        future.add_done_callback(self._note)
        return lambda: self._result(future)

    def map(self, chunks: Iterable[Given], *, ahead: int) -> Iterator[Made]:
        """Results in order, `ahead` chunks for each process being worked on beside the one that is waited for."""
        pending: deque[Callable[[], Made]] = deque()
        for chunk in chunks:
            pending.append(self.submit(chunk))
            if len(pending) > ahead * self.number:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()

    def _note(self, future: "Future[bytes | WorkerFailure]") -> None:
        """Some process gave something."""
        self._finished = time.monotonic()

    def _result(self, future: "Future[bytes | WorkerFailure]") -> Made:
        try:
            found = self._waited_for(future)
        except BrokenProcessPool as error:
            raise self._died(error) from error
        if isinstance(found, WorkerFailure):
            raise found.exception()
        made: Made = pickle.loads(found)
        return made

    def _waited_for(self, future: "Future[bytes | WorkerFailure]") -> bytes | WorkerFailure:
        """The result, as long as chunks are finished: this one may stand behind many others."""
        began = time.monotonic()
        while True:
            left = max(began, self._finished) + self._timeout - time.monotonic()
            try:
                return future.result(timeout=max(0.0, left))
            except TimeoutError as error:
                if left > 0 or future.done():
                    continue
                self.close(kill=True)
                raise DataError(
                    f"a data worker gave nothing for {self._timeout:g} s; write a larger data.loader.timeout "
                    "where rows take that long, else fewer data.loader.workers, or 0 to see what it does"
                ) from error

    def _died(self, error: Exception) -> DataError:
        self.close(kill=True)
        said = " ".join(str(error).split()).rstrip(". ")
        return DataError(f"a data worker died ({said}); write fewer data.loader.workers, or 0")

    def close(self, *, kill: bool = False) -> None:
        """End the processes; with `kill`, whatever they are doing. A second time, or in a fork, does nothing."""
        pool, self._executor = self._executor, None
        if pool is None or os.getpid() != self._owner:
            return
        atexit.unregister(self._close_at_exit)
        if kill:
            for process in list((pool._processes or {}).values()):  # a method for it comes in Python 3.14
                process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        if self._thaws:
            gc.unfreeze()

    def _close_at_exit(self) -> None:
        self.close(kill=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)


def executor(work: Callable[[Any], Any], options: LoaderOptions) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        options.workers,
        mp_context=multiprocessing.get_context(options.start_method),
        initializer=begin,
        initargs=(work,),
    )


def begin(work: Callable[[Any], Any]) -> None:
    """Make a process ready: it leaves signals to the program that started it, and ends with that program."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked tokenizer that was used before waits for lost threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def packed(chunk: Any) -> bytes:
    """A chunk as it is sent to a worker. Raises DataError where that cannot be."""
    try:
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"rows cannot be sent to a data worker ({error}); give rows of plain values, or write "
            "data.loader.workers: 0"
        ) from error


def run_work(chunk: bytes) -> bytes | WorkerFailure:
    """The pickled result of a pickled chunk."""
    try:
        return pickle.dumps(_work(pickle.loads(chunk)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # whatever it is, the program must hear of it
        said = "".join(traceback.format_exception_only(error)).strip()
        return WorkerFailure(sent(error), said, "".join(traceback.format_exception(error)).rstrip())


def sent(error: BaseException) -> bytes | None:
    """An exception pickled; None where another one would come out, or none that a chunk may raise."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        found = pickle.loads(data)
        return data if type(found) is type(error) and str(found) == str(error) else None
    except Exception:  # anything may be among its attributes
        return None
