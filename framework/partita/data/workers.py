"""Worker processes that map chunks to results, in order; the number of processes does not change the results.

Data travels through pipes, so nothing is left in shared memory however a process ends. Pickling is done here and not by
the pool: the pool loses a process to data that cannot be unpickled and does not report what it was.
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

from partita_schema.common.garbage_collection import others_have_frozen
from partita_schema.errors import DataError, DataWorkerError
from partita_schema.sections.data import LoaderOptions
from partita_trainers.interrupt import end_with_parent

Input = TypeVar("Input")
Output = TypeVar("Output")

_work: Callable[[Any], Any]
"""What a worker process does with each chunk; set when the process starts."""


@dataclass(frozen=True)
class WorkerFailure:
    """The exception that a chunk ended with."""

    error: bytes | None
    """The exception, pickled; None if pickling would change it."""
    text: str
    """Its type and text."""
    trace: str
    """Its traceback."""

    def exception(self) -> Exception:
        """Return the exception itself, or a RuntimeError with its text and traceback."""
        with suppress(Exception):  # the class may exist only in the worker; its text is known
            if self.error is not None:
                error: Exception = pickle.loads(self.error)
                error.__cause__ = InWorker(f"\n{self.trace}")
                return error
        return RuntimeError(f"a data worker raised {self.text}\n{self.trace}")


class InWorker(Exception):  # noqa: N818 -- it says where
    """The traceback in the worker, as the cause of an exception raised there."""


class EncodingWorkers(Generic[Input, Output]):
    """Hand chunks to worker processes. Without workers, a chunk is processed when its result is requested."""

    def __init__(self, work: Callable[[Input], Output], options: LoaderOptions) -> None:
        """Start `options.workers` processes; `work` must be picklable unless they are forked."""
        self._work = work
        self._timeout = options.timeout
        self.number = options.workers
        self._executor: ProcessPoolExecutor | None = None
        self._finished = time.monotonic()
        if options.workers:
            self._thaws = not others_have_frozen()  # what a program has frozen itself stays frozen
            gc.freeze()  # garbage collection in forked processes would copy nearly all shared pages
            self._executor = executor(work, options)
            self._owner = os.getpid()
            # An object that is finalized at interpreter exit finds its modules gone.
            atexit.register(self._close_at_exit)

    def submit(self, chunk: Input) -> Callable[[], Output]:
        """Start work on a chunk and return a function that waits for its result.

        The function raises what the work raised, or a RuntimeError with the traceback if that cannot be pickled, and
        DataWorkerError if the worker died or no worker has finished a chunk within the timeout.
        """
        if not self.number:
            return lambda: self._work(chunk)
        assert self._executor is not None, "submit after close"
        try:
            future = self._executor.submit(run_work, packed(chunk))
        except BrokenProcessPool as error:
            raise self._died(error) from error
        future.add_done_callback(self._note)
        return lambda: self._result(future)

    def map(self, chunks: Iterable[Input], *, ahead: int) -> Iterator[Output]:
        """Yield results in order, with `ahead` chunks per process in progress besides the one that is awaited."""
        pending: deque[Callable[[], Output]] = deque()
        for chunk in chunks:
            pending.append(self.submit(chunk))
            if len(pending) > ahead * self.number:
                yield pending.popleft()()
        while pending:
            yield pending.popleft()()

    def _note(self, future: "Future[bytes | WorkerFailure]") -> None:
        """Record that a worker has finished a chunk."""
        self._finished = time.monotonic()

    def _result(self, future: "Future[bytes | WorkerFailure]") -> Output:
        try:
            result = self._waited_for(future)
        except BrokenProcessPool as error:
            raise self._died(error) from error
        if isinstance(result, WorkerFailure):
            raise result.exception()
        value: Output = pickle.loads(result)
        return value

    def _waited_for(self, future: "Future[bytes | WorkerFailure]") -> bytes | WorkerFailure:
        """Wait for a result while other chunks are being finished: many chunks may be queued before this one."""
        began = time.monotonic()
        while True:
            left = max(began, self._finished) + self._timeout - time.monotonic()
            try:
                return future.result(timeout=max(0.0, left))
            except TimeoutError as error:
                if left > 0 or future.done():
                    continue
                self.close(kill=True)
                raise DataWorkerError(
                    f"a data worker returned nothing for {self._timeout:g} s; write a larger data.loader.timeout "
                    "where rows take that long, else fewer data.loader.workers, or 0 to see what it does"
                ) from error

    def _died(self, error: Exception) -> DataWorkerError:
        self.close(kill=True)
        text = " ".join(str(error).split()).rstrip(". ")
        return DataWorkerError(f"a data worker died ({text}); write fewer data.loader.workers, or 0")

    def close(self, *, kill: bool = False) -> None:
        """Stop the processes; with `kill`, at once. Do nothing if already closed or in a forked process."""
        pool, self._executor = self._executor, None
        if pool is None or os.getpid() != self._owner:
            return
        atexit.unregister(self._close_at_exit)
        if kill:
            for process in list((pool._processes or {}).values()):  # noqa: SLF001  # Python 3.14 has a method for this
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
    """Prepare a worker: the parent process handles signals, and the worker ends when the parent does."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # a fork of a tokenizer that was used before waits for threads it does not have
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def packed(chunk: Any) -> bytes:
    """Pickle a chunk for a worker. Raise DataError if it cannot be pickled."""
    try:
        return pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"rows cannot be sent to a data worker ({error}); give rows of plain values, or write "
            "data.loader.workers: 0"
        ) from error


def run_work(chunk: bytes) -> bytes | WorkerFailure:
    """Return the pickled result of a pickled chunk."""
    try:
        return pickle.dumps(_work(pickle.loads(chunk)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # the parent process must learn of any exception
        text = "".join(traceback.format_exception_only(error)).strip()
        return WorkerFailure(sent(error), text, "".join(traceback.format_exception(error)).rstrip())


def sent(error: BaseException) -> bytes | None:
    """Pickle an exception; return None if it is not an Exception or does not survive pickling unchanged."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        return data if type(copy) is type(error) and str(copy) == str(error) else None
    except Exception:  # an exception may have any attributes
        return None
