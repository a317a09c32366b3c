"""Tests of the monitor of remote ranks: their messages, their end and their death."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from partita.backends.ray.event_queue import (
    EventQueue,
    JobFinished,
    LogMessage,
    Posted,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankDied,
    RankFinished,
    RankStarted,
)
from partita.backends.ray.rank_monitor import END_SECONDS, EVALUATION, SIMULATION, TRAINING, RankWork, follow
from partita_schema.errors import DataError, JobError, LostRankError, PartitaError, SimulationError, TrainingError

BOTH: tuple[Posted, ...] = (("a", RankStarted(0, 2, "node-0", 11)), ("b", RankStarted(1, 2, "node-1", 12)))
RESTARTED: tuple[Posted, ...] = (("c", RankStarted(0, 2, "node-0", 21)), ("d", RankStarted(1, 2, "node-0", 22)))
DEATH: tuple[Posted, ...] = (("a", RankFinished(LostRankError("gone"))), ("", RankDied([0, 1], ["a", "b"])))


class Script:
    """Ranks that send scripted messages in parts and are then silent."""

    def __init__(self, *parts: Sequence[Posted], after_stop: Sequence[Posted] = ()) -> None:
        self.parts, self.after_stop = list(parts), after_stop
        self.done: list[str] = []

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """Return the next part of the messages."""
        if not self.parts:
            time.sleep(0.01)
        return self.parts.pop(0) if self.parts else ()

    def stop(self) -> None:
        """Record the call; send the messages for it."""
        self.done.append("stop")
        self.parts.append(self.after_stop)

    def end(self, sender: str) -> None:
        """Record the call."""
        self.done.append(f"end {sender}")

    def close(self) -> None:
        """Record the call."""
        self.done.append("close")

    def resources(self) -> Mapping[str, float]:
        """Return the resources of one machine."""
        return {"CPUs": 2.0, "GPUs": 0.0}


def followed(
    ranks: Script,
    *,
    max_failures: int = 3,
    timeout_seconds: float = 60.0,
    quiet: bool = True,
    work: RankWork = TRAINING,
    end_seconds: float = END_SECONDS,
) -> Any:
    return follow(
        ranks,
        workers=2,
        max_failures=max_failures,
        timeout_seconds=timeout_seconds,
        quiet=quiet,
        work=work,
        end_seconds=end_seconds,
    )


def test_the_result_is_that_of_rank_0(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    shown: list[Posted] = [
        ("a", ProgressOpened(1, 4, "training", 1)),
        ("a", ProgressMoved(1, 3, {"loss": 0.5})),
        ("a", LogMessage("partita.training.run", 30, "2 rows left out")),
        ("a", ProgressClosed(1)),
    ]
    ranks = Script(
        BOTH, shown, [("b", RankFinished(None, "second")), ("a", RankFinished(None, "first"))], [("", JobFinished())]
    )

    assert followed(ranks, quiet=False) == "first"
    assert capsys.readouterr() == ("", "training 4/4  loss 0.5\n")
    assert caplog.messages == ["2 rows left out"]
    assert ranks.done == ["close"]


def test_an_error_is_raised_after_the_other_ranks_have_ended() -> None:
    ranks = Script(
        BOTH, [("b", RankFinished(DataError("row 7 is empty")))], [("a", RankFinished(LostRankError("gone")))]
    )

    with pytest.raises(DataError, match="row 7 is empty"):
        followed(ranks)

    assert ranks.done == ["end b", "close"], "there is no wait for a rank that has ended"


def test_ranks_that_do_not_end_with_the_others_are_waited_for_a_few_seconds() -> None:
    with pytest.raises(DataError, match="row 7 is empty"):
        followed(Script(BOTH, [("b", RankFinished(DataError("row 7 is empty")))]), end_seconds=0.05)


def test_a_death_is_reported_in_a_line_and_messages_of_old_ranks_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    late: list[Posted] = [("b", LogMessage("partita", 40, "too late")), ("b", RankFinished(DataError("too late")))]
    end: list[Posted] = [("c", RankFinished(None, "made")), ("d", RankFinished(None)), ("", JobFinished())]

    assert followed(Script(BOTH, [("a", ProgressOpened(1, 9, "training", 0))], DEATH, late, RESTARTED, end)) == "made"
    assert caplog.messages == [
        "rank 1 (process 12 on node-1) is gone; all are restarted from the newest checkpoint (1 of 3 times)"
    ]


def test_one_death_too_many_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    again: list[Posted] = [
        ("c", RankFinished(LostRankError("gone"))),
        ("", RankDied([1], ["c", "d"])),
        ("", JobFinished("...", is_death=True)),
    ]

    with pytest.raises(TrainingError) as error:
        followed(Script(BOTH, DEATH, RESTARTED, again), max_failures=1)

    assert str(error.value) == (
        "rank 1 (process 22 on node-0) is gone, and backend.max_failures: 1 allows no further start; saved "
        "checkpoints are kept, rerun the same command to resume"
    )
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("work", "kind", "again", "advice"),
    [
        (EVALUATION, JobError, "from the first row", "rerun the same command"),
        (
            SIMULATION,
            SimulationError,
            "and continue with the remaining dialogues",
            "finished dialogues are kept, rerun the same command to resume",
        ),
    ],
    ids=["evaluation", "simulation"],
)
def test_deaths_in_other_work_than_training_are_reported_in_its_words(
    caplog: pytest.LogCaptureFixture, work: RankWork, kind: type[JobError], again: str, advice: str
) -> None:
    ends: list[Posted] = [("", RankDied([1], ["c", "d"])), ("", JobFinished("...", is_death=True))]

    with pytest.raises(kind) as error:
        followed(Script(BOTH, DEATH, RESTARTED, ends), max_failures=1, work=work)

    assert caplog.messages == [
        f"rank 1 (process 12 on node-1) is gone; all are restarted {again} (1 of 1 times)",
    ]
    assert str(error.value) == (
        f"rank 1 (process 22 on node-0) is gone, and backend.max_failures: 1 allows no further start; {advice}"
    )
    with pytest.raises(kind, match=f"Ray has ended the {work.name}: no room for workers; {advice}"):
        followed(Script([("", JobFinished("no room for workers"))]), work=work)


def test_an_internal_error_of_ray_is_reported() -> None:
    with pytest.raises(TrainingError, match="Ray has ended the training: no room for workers; saved checkpoints are "):
        followed(Script([("", JobFinished("no room for workers"))]))


def test_waiting_for_ranks_to_start_has_a_limit() -> None:
    with pytest.raises(PartitaError) as error:
        followed(Script(BOTH[:1]), timeout_seconds=0.05)

    assert str(error.value) == (
        "1 of 2 workers have started within 0 s (backend.timeout_seconds). In all there are 2 CPUs, 0 GPUs: write a "
        "smaller backend.workers, add machines, or write a longer time"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_ranks_and_waits_for_them(number: signal.Signals) -> None:
    class InterruptedScript(Script):
        def poll(self, timeout_seconds: float) -> Sequence[Posted]:
            if not self.parts and not self.done:
                os.kill(os.getpid(), number)
            return super().poll(timeout_seconds)

    ranks = InterruptedScript(
        BOTH, after_stop=[("a", RankFinished(KeyboardInterrupt())), ("b", RankFinished(KeyboardInterrupt()))]
    )

    with pytest.raises(KeyboardInterrupt):
        followed(ranks)

    assert ranks.done[0] == "stop"
    assert ranks.done[-1] == "close"


def test_ranks_are_not_restarted_after_the_queue_is_stopped() -> None:
    board = EventQueue()
    board.post("a", RankStarted(0, 1, "node-0", 11), "actor")
    assert not board.is_stopping()
    board.stop()
    assert board.is_stopping()
    assert board.record_deaths([0])
    assert not any(isinstance(message, RankDied) for _, message in board.fetch()[0])


def test_the_queue_reports_whether_a_death_ends_the_work() -> None:
    board = EventQueue()
    board.post("a", RankStarted(0, 2, "node-0", 11), "actor")
    board.post("a", RankFinished(LostRankError("gone")), "actor")
    assert not board.record_deaths([0, 1]), "it ended together with another rank"
    board.post("c", RankStarted(0, 2, "node-0", 21), "another")
    assert board.is_at_work()
    board.post("c", RankFinished(DataError("row 7 is empty")), "another")
    assert not board.is_at_work()
    assert board.record_deaths([0])

    messages, ranks = board.fetch()

    assert [message for _, message in messages if isinstance(message, RankDied)] == [RankDied([0, 1], ["a"])]
    assert ranks == {"a": "actor", "": None, "c": "another"}
    assert board.fetch()[0] == []
