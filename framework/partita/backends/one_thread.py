"""One thread at a time: the verbs of a Model share its weights and hooks, so the second thread waits for the first."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@runtime_checkable
class Closing(Protocol):
    """An iterator that can be closed, such as a generator."""

    def close(self) -> object:
        """End the iteration."""


class ThreadLock:
    """A reentrant lock that says if it has to wait. A copy, also in another process, is a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._abandoned: list[Closing] = []

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            logger.info("waiting for another thread that uses this model")
            self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        while self._abandoned:
            self._abandoned.pop().close()
        self._lock.release()

    def __reduce__(self) -> tuple[type["ThreadLock"], tuple[()]]:
        return ThreadLock, ()

    def iterate(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items of an iterator, each computed under the lock; between them other threads go on.

        If this is closed while another thread holds the lock, that thread closes `items`.
        """
        end = object()
        try:
            while True:
                with self:
                    item = next(items, end)
                if item is end:
                    return
                yield item  # type: ignore[misc]  # not the end
        finally:
            if isinstance(items, Closing):
                self._abandoned.append(items)
                if self._lock.acquire(blocking=False):
                    self.__exit__()


class HasLock(Protocol):
    """An object whose methods one thread uses at a time."""

    _lock: ThreadLock


S = TypeVar("S", bound=HasLock)


def in_one_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let one thread at a time call the methods of an object that have this decorator."""

    @wraps(method)
    def locked(model: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with model._lock:  # noqa: SLF001
            return method(model, *args, **kwargs)

    return locked
