"""Processes that work on chunks, for any number of them the same results in the same order.

What goes in and comes out travels through pipes, so that nothing is left in shared memory however a process ends.
"""

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from partita_schema.data import LoaderOptions
from partita_schema.errors import DataError

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

_work: Callable[[Any], Any]
"""What a worker process does with each chunk; set when it starts."""


class Workers(Generic[Given, Made]):
    """Hands chunks to processes. Without any, a chunk is worked on when its result is asked for."""

    def __init__(self, work: Callable[[Given], Made], options: LoaderOptions) -> None:
        """`work` can be sent to other processes, unless they are forked."""
        self._work = work
        self._timeout = options.timeout
        self.number = options.workers
        self._executor = None
        if options.workers:
            gc.freeze()  # looking for garbage among what forked processes share would copy nearly all of it, in each
            self._executor = executor(work, options)

    def submit(self, chunk: Given) -> Callable[[], Made]:
        """Begin with a chunk. What comes back waits for its result.

        That raises what the work raised, and DataError where its process died or gave nothing for too long.
        """
        if self._executor is None:
            return lambda: self._work(chunk)
        try:
            future = self._executor.submit(run_work, chunk)
        except BrokenProcessPool as error:
            raise self._died(error) from error
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

    def _result(self, future: "Future[Made]") -> Made:
        try:
            return future.result(timeout=self._timeout)
        except BrokenProcessPool as error:
            raise self._died(error) from error
        except TimeoutError as error:
            if future.done():  # the work itself raised it
                raise
            self.close(kill=True)
            raise DataError(
                f"a data worker gave nothing for {self._timeout:g} seconds; write a larger data.loader.timeout where "
                "rows take that long, else fewer data.loader.workers, or 0 to see what it does"
            ) from error

    def _died(self, error: Exception) -> DataError:
        self.close(kill=True)
        said = " ".join(str(error).split()).rstrip(". ")
        return DataError(f"a data worker died ({said}); write fewer data.loader.workers, or 0")

    def close(self, *, kill: bool = False) -> None:
        """End the processes; with `kill`, whatever they are doing."""
        if self._executor is None:
            return
        if kill:
            for process in list((self._executor._processes or {}).values()):  # a method for it comes in Python 3.14
                process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)
        gc.unfreeze()

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


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_work(chunk: Any) -> Any:
    return _work(chunk)
