"""Tests of a rank, run in a thread: its messages, and how it is stopped."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from partita.backends.ray.event_queue import (
    LogMessage,
    Message,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankFinished,
    RankStarted,
)
from partita.backends.ray.rank import RankEndedError, run_rank
from partita.backends.ray.worker import listen
from partita.runs.progress import show_progress
from partita_schema.errors import DataError
from partita_trainers.interrupt import interruption


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def messages_of(work: Callable[[], Any], *, stop: threading.Event | None = None, quiet: bool = False) -> list[Message]:
    """Return the messages of a rank that runs `work`."""
    messages: list[Message] = []
    stopping = stop or threading.Event()

    def rank() -> None:
        try:
            run_rank(work, send=messages.append, is_stopping=stopping.is_set, threads="1", quiet=quiet)
        except RankEndedError:
            messages.append(LogMessage("raised", 0, ""))

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    return messages


def test_logs_and_progress_are_reported_in_order() -> None:
    def work() -> str:
        logging.getLogger("partita.training.run").info("%d rows", 7)
        with show_progress(3, "training", completed=1) as progress:
            progress.advance(1, loss=0.5)
            progress.advance(1, loss=0.25)
        return "made"

    came, *messages = messages_of(work)

    assert isinstance(came, RankStarted)
    assert (came.rank, came.ranks) == (0, 1)
    assert messages == [
        LogMessage("partita.training.run", logging.INFO, "7 rows"),
        ProgressOpened(1, 3, "training", 1),
        ProgressMoved(1, 2, {"loss": 0.25}),
        ProgressClosed(1),
        RankFinished(None, "made"),
    ]


def test_a_quiet_rank_reports_no_logs() -> None:
    assert len(messages_of(lambda: logging.getLogger("partita.training.run").info("7 rows"), quiet=True)) == 2


@pytest.mark.parametrize("error", [DataError("row 7 is empty"), ZeroDivisionError("division by zero")])
def test_an_error_is_reported_with_its_traceback(error: Exception) -> None:
    def fail() -> None:
        raise error

    *_, left, raised = messages_of(fail)

    assert isinstance(left, RankFinished)
    assert type(left.error) is type(error)
    assert str(left.error) == str(error)
    assert "in fail" in left.error.__notes__[0]
    assert left.error.__notes__[0].startswith("raised in rank 0 on ")
    assert raised == LogMessage("raised", 0, "")


def test_an_error_that_cannot_be_pickled_is_reported_by_name() -> None:
    class Local(Exception):  # noqa: N818 -- no error of anybody's
        pass

    def fail() -> None:
        raise Local("of a class that only exists here")

    left = messages_of(fail)[-2]

    assert isinstance(left, RankFinished)
    assert str(left.error) == "Local: of a class that only exists here"


def test_a_training_rank_stops_after_a_step() -> None:
    stop = threading.Event()

    def work() -> int:
        with interruption("stopping after this step") as interrupt:
            for step in range(10_000):
                stop.set()
                time.sleep(0.01)
                if interrupt.requested:
                    return step
        return -1

    left = messages_of(work, stop=stop)[-1]

    assert isinstance(left, RankFinished)
    assert left.result >= 0


def test_other_work_is_interrupted() -> None:
    stop = threading.Event()

    def work() -> None:
        stop.set()
        for _ in range(10_000):
            time.sleep(0.01)

    left = messages_of(work, stop=stop)[-2]

    assert isinstance(left, RankFinished)
    assert isinstance(left.error, KeyboardInterrupt)


def test_a_worker_sends_warnings_and_errors_only() -> None:
    messages = deque[LogMessage]()
    listen(messages)

    logging.getLogger("partita.generation").warning("%d rows left out", 2)
    logging.getLogger("partita_trainers").info("nothing to say")

    assert list(messages) == [LogMessage("partita.generation", logging.WARNING, "2 rows left out")]
