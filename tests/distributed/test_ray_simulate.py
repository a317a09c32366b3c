"""Tests of simulations on Ray: transcripts equal those of one process, also after the death of a worker."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from partita import Model

from ..local_ray import local_ray
from .moments import when
from .test_rounds_ranks import folder as rounds
from .test_rounds_ranks import left
from .test_simulation_ranks import settings, straight

__all__ = ["rounds", "straight"]

pytestmark = pytest.mark.long

SLOW = {
    "type": "environment",
    "environment": "worlds_of_tests:Echo",
    "options": {"pause": 0.1},
    "isolation": "process",
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Start Ray on this machine."""
    with local_ray() as ray:
        yield ray


def count_dialogues(output: Path) -> int:
    """Return the number of dialogues saved by ranks, plus a line for each of their files."""
    return sum(path.read_bytes().count(b"\n") for path in output.glob(".*.jsonl"))


def kill_worker() -> None:
    """Kill one of Ray's workers with SIGKILL."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::RayTrainW"):
                process.kill()
                return


def test_dialogues_on_ray_with_a_killed_worker_equal_those_of_one_process(
    ray: Any,
    straight: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copytree(straight[0], tmp_path / "job", ignore=shutil.ignore_patterns("out"))
    monkeypatch.chdir(tmp_path / "job")
    file = settings(world=SLOW) | {"backend": {"type": "ray", "workers": 2}}
    Path("run.yaml").write_text(json.dumps(file), encoding="utf8")
    out = Path("out")

    killed = when(lambda: count_dialogues(out) >= 15, kill_worker)
    report = Model("run.yaml").simulate(out)
    killed.join()

    assert "is gone; all are restarted and continue with the remaining dialogues (1 of 3 times)" in caplog.text
    assert json.loads(json.dumps(report.record())) == straight[1]
    for name in ("gold.jsonl", "predicted.jsonl"):
        assert (out / name).read_bytes() == (straight[0] / "out" / name).read_bytes()
    keys = [json.loads(line)["dialogue"] for line in (out / ".gold.jsonl").read_text("utf8").splitlines()[1:]]
    assert len(keys) == len(set(keys)) == 60, "no dialogue runs twice"
    assert {path.name for path in out.iterdir()} == {
        "gold.jsonl",
        "predicted.jsonl",
        ".gold.jsonl",
        ".predicted.jsonl",
        "index.html",
        "report.html",
        "simulation.json",
    }


def test_self_training_on_ray_with_a_killed_worker_equals_that_of_one_process(
    ray: Any,
    processes: Any,
    rounds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = tmp_path.parent / f"{tmp_path.name}-ray"
    shutil.copytree(rounds, other)
    processes.start(1, rounds, "train:8")
    monkeypatch.chdir(other)
    file = yaml.safe_load(Path("run.yaml").read_text("utf8")) | {"backend": {"type": "ray", "workers": 2}}
    file["trainer"]["max_steps"] = 8
    Path("run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")

    killed = when(lambda: count_dialogues(Path("run/rounds/2/transcripts")) >= 6, kill_worker)
    result = Model("run.yaml").train(run="run")
    killed.join()

    assert "is gone; all are restarted from the newest checkpoint (1 of 3 times)" in caplog.text
    assert result.steps == 8 + 6 + 6
    assert left(other) == left(rounds)
