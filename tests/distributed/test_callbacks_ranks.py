"""Tests that callbacks run on rank 0 only, and that all ranks agree on a stop and on a failure."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long


def test_all_ranks_stop_after_the_step_at_which_rank_0_asks(processes: Any, tmp_path: Path) -> None:
    folder = processes.prepare(tmp_path / "job", processes.settings())
    results = processes.start(2, folder, "train_with_callbacks:stop")
    assert results["train_with_callbacks:stop"] == {"steps": 2, "stopped_early": True}
    assert (folder / "steps-0.txt").read_text() == "1 2 "
    assert not (folder / "steps-1.txt").exists()
    assert json.loads((folder / "run" / "manifest.json").read_text())["status"] == "done"


def test_a_failing_callback_ends_all_ranks_and_the_run_is_failed(processes: Any, tmp_path: Path) -> None:
    folder = processes.prepare(tmp_path / "job", processes.settings())
    job = processes.launch(2, folder, "train_with_callbacks:fail")
    for rank in job:
        rank.communicate()
    assert [rank.returncode for rank in job] == [1, 1]
    own, other = ((folder / f"error-{rank}.txt").read_text() for rank in range(2))
    assert own.startswith("TrainingError: the callback FailAtTwo failed in on_step at step 2 (")
    assert other.startswith("OtherRankError: ")
    assert json.loads((folder / "run" / "manifest.json").read_text())["status"] == "failed"
