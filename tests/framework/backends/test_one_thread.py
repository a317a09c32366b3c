"""Tests of threads that take turns with a model."""

import copy
import pickle
import threading
from collections.abc import Iterator

import pytest

from partita.backends.one_thread import ThreadLock, in_one_thread


class Work:
    """An object with a method that another one of it calls."""

    def __init__(self) -> None:
        self._lock = ThreadLock()

    @in_one_thread
    def outer(self) -> str:
        return self.inner(suffix="!")

    @in_one_thread
    def inner(self, *, suffix: str) -> str:
        return f"done{suffix}"


def test_a_thread_may_call_methods_in_methods() -> None:
    assert Work().outer() == "done!"


def test_a_copy_has_its_own_lock() -> None:
    lock = ThreadLock()
    with lock:
        for copied in (copy.copy(lock), copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
            threads = [threading.Thread(target=copied.__enter__)]
            threads[0].start()
            threads[0].join(timeout=10)
            assert not threads[0].is_alive()


def test_a_stream_that_is_left_is_closed_by_the_thread_that_uses_the_model() -> None:
    ended: list[str] = []

    def items() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            ended.append(threading.current_thread().name)

    lock, entered, leave = ThreadLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            entered.set()
            leave.wait(10)

    stream = lock.iterate(items())
    assert next(stream) == 0
    owner = threading.Thread(target=hold, name="owner")
    owner.start()
    entered.wait(10)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert ended == []
    leave.set()
    owner.join(10)
    assert ended == ["owner"]


@pytest.mark.parametrize("taken", [1, 3, 4])
def test_a_stream_is_closed_when_it_ends(taken: int) -> None:
    ended: list[bool] = []

    def items() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            ended.append(True)

    stream = ThreadLock().iterate(items())
    assert [next(stream, None) for _ in range(taken)] == [0, 1, 2, None][:taken]
    del stream
    assert ended == [True]
