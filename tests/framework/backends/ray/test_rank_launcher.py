"""Tests of the launcher of Ray ranks."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from partita.backends.ray.rank_launcher import RayRankLauncher
from partita.backends.ray.rank_monitor import SIMULATION, TRAINING, RankWork


class RayError(Exception):
    """An error of Ray."""


@pytest.mark.parametrize("work", [TRAINING, SIMULATION], ids=lambda work: work.name)
def test_the_end_of_ray_is_reported_in_one_line(work: RankWork) -> None:
    def get(reference: Any) -> None:
        raise RayError("The actor died unexpectedly.\n\tclass_name: EventQueue\n")

    launcher = RayRankLauncher.__new__(RayRankLauncher)
    launcher.ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=RayError))
    launcher.board = SimpleNamespace(fetch=SimpleNamespace(remote=object))
    launcher.thread, launcher.work = threading.Thread(target=object), work
    launcher.thread.start()

    with pytest.raises(work.error) as error:
        launcher.poll(1)

    assert str(error.value) == (f"Ray is gone ('The actor died unexpectedly. class_name: EventQueue'); {work.advice}")
