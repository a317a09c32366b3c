"""Tests of closing environments in the background while dialogues continue."""

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import pytest

from partita.data.episode import Episode
from partita.simulation.agents import TurnContext
from partita.simulation.rollout import Rollout
from partita.simulation.worlds import BackgroundCloser, Play, RequestTurn
from partita_schema.sections.simulation import Limits


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


EXIT = """
from partita.data.episode import Episode
from partita.simulation.worlds import BackgroundCloser, EnvironmentWorld

class Echo:
    def reset(self, *, seed, task):
        return "hi", {}

world = EnvironmentWorld(Echo, max_turns=2, closer=BackgroundCloser())
play = world.run(Episode("a", "a", {}, 1))
next(play)
cycle = [play]
cycle.append(cycle)
print("end")
"""


def test_a_world_that_is_collected_at_the_exit_does_not_stop_it() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")


class Waits:
    """A world that requests turns forever, and records that it was closed."""

    closed: ClassVar[list[str]] = []

    def run(self, episode: Episode) -> Play:
        try:
            while True:
                yield RequestTurn("guest")
        finally:
            self.closed.append(episode.key)


class Agrees:
    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        return ["yes"] * len(contexts)


def test_worlds_of_active_episodes_are_closed_when_a_rollout_stops() -> None:
    stops = threading.Event()
    rollout = Rollout(Waits(), {"guest": Agrees}, concurrency=3, seed=1, limits=Limits(), stopping=stops.is_set)
    threading.Timer(0.5, stops.set).start()

    assert list(rollout.run(iter([Episode(key, key, {}, 1) for key in "abcd"]))) == []
    assert sorted(Waits.closed) == ["a", "b", "c"]


def test_an_environment_that_does_not_close_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    closing, gone = BackgroundCloser(), threading.Event()
    closing.begin(gone.wait)  # type: ignore[arg-type]
    closing.end(0.1)
    gone.set()

    assert "1 environment has not closed within 0.1 s (limits.step_seconds)" in caplog.text
