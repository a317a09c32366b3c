"""Tests of the fraction of failed dialogues at which a simulation ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.data.episode import Episode
from partita.simulation.shared_rollout import RolloutProgress, record, remaining_episodes
from partita.simulation.transcripts import Transcripts
from partita_schema.sections.simulation import Limits
from partita_trainers.process_group import SINGLE_PROCESS


class Ended:
    """A rollout of dialogues that have already ended."""

    active: dict[int, Any] = {}

    def run(self, episodes: Iterator[Episode]) -> Iterator[Episode]:
        return episodes


class Shown:
    """A progress display that adds up its updates."""

    total = 0

    def advance(self, amount: int = 1, **shown: Any) -> None:
        self.total += amount


def ended(number: int, *, failed: bool) -> Episode:
    result = Episode(f"task-{number}", f"task-{number}", {}, number)
    result.end("failed" if failed else "done", "environment: no" if failed else None)
    return result


@pytest.mark.parametrize(
    ("failed", "good", "fraction", "expected"),
    [
        (10, 10, 0.5, (20, False)),  # exactly the allowed number
        (11, 10, 0.5, (20, True)),
        (19, 0, 0.5, (19, False)),  # too few dialogues to decide
        (0, 30, 0.0, (30, False)),
        (1, 30, 0.0, (20, True)),
        (30, 0, 1.0, (30, False)),
    ],
)
def test_a_simulation_ends_when_more_dialogues_fail_than_allowed(
    tmp_path: Path, failed: int, good: int, fraction: float, expected: tuple[int, bool]
) -> None:
    dialogues = [ended(number, failed=number < failed) for number in range(failed + good)]
    display = Shown()
    with Transcripts(tmp_path, "predicted", decided_by={}) as transcripts:
        shared_progress = RolloutProgress(SINGLE_PROCESS, ended=0, failed=0)
        limits = Limits(fail_fraction=fraction)
        result = record(
            Ended(), iter(dialogues), transcripts, shared_progress=shared_progress, display=display, limits=limits
        )  # type: ignore[arg-type]
        assert len(transcripts.done) == expected[0]
    assert result == expected
    assert display.total == expected[0]


@pytest.mark.parametrize(
    ("failed", "good", "fraction", "again"),
    [(10, 10, 0.5, 0), (11, 9, 0.5, 11), (20, 0, 1.0, 0), (19, 0, 0.5, 0), (1, 29, 0.0, 1)],
)
def test_failed_dialogues_of_a_simulation_that_ended_are_run_again_only_if_more_failed_than_allowed(
    tmp_path: Path, failed: int, good: int, fraction: float, again: int
) -> None:
    dialogues = [ended(number, failed=number < failed) for number in range(failed + good)]
    with Transcripts(tmp_path, "predicted", decided_by={}) as transcripts:
        for dialogue in dialogues:
            transcripts.add(dialogue)
        remaining, progress = remaining_episodes(
            dialogues, transcripts, limits=Limits(fail_fraction=fraction), process_group=SINGLE_PROCESS
        )
    assert remaining == dialogues[:again]
    assert progress.before == ((good, 0) if again else (good + failed, failed))
