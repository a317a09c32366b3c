"""Tests of closing environments in the background while dialogues continue."""

import threading
import time

import pytest

from partita.simulation.worlds import BackgroundCloser


def test_the_end_waits_for_environments_that_are_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection may close a world in any thread, also while the end waits for others."""
    closing, closed = BackgroundCloser(), threading.Event()
    start = threading.Thread.start

    def slowly(self: threading.Thread) -> None:
        if self.name == "partita-closing":
            time.sleep(0.3)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    forgetting = threading.Thread(target=closing.begin, args=(closed.set,))
    forgetting.start()
    time.sleep(0.1)
    closing.end(5.0)

    assert closed.is_set()
    forgetting.join()


def test_a_world_that_is_collected_while_another_starts_closing_does_not_deadlock() -> None:
    """Garbage collection may run at any point, here while `begin` holds its lock."""
    closing, closed = BackgroundCloser(), threading.Event()
    with closing.lock:
        closing.begin(closed.set)
    closing.end(5.0)

    assert closed.is_set()


def test_an_environment_that_does_not_close_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    closing, gone = BackgroundCloser(), threading.Event()
    closing.begin(gone.wait)  # type: ignore[arg-type]
    closing.end(0.1)
    gone.set()

    assert "1 environment has not closed within 0.1 s (limits.step_seconds)" in caplog.text
