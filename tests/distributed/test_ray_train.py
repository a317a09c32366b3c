"""Tests of training on Ray: the same steps as in one process, also after deaths, and unchanged errors."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from partita import DataError, Model

from ..local_ray import local_ray
from .moments import when

pytestmark = pytest.mark.long

COLLATE = """
import os
from partita import DataError
from partita.data.batching.collate import collate

class Failing:
    calls = 0

    def __call__(self, encoded, planned, pad_token_id):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 5:
            raise DataError("no such ball")
        return collate(encoded, planned, pad_token_id=pad_token_id)
"""
ON_RAY = ["backend.type=ray", "backend.workers=2"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Start Ray on this machine."""
    with local_ray() as ray:
        yield ray


@pytest.fixture
def folder(processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with rows and a configuration; return it."""
    prepared: Path = processes.prepare(tmp_path / "job", processes.settings())
    monkeypatch.chdir(prepared)
    return prepared


def kill_worker(killed: list[int]) -> None:
    """Kill a training worker with SIGKILL."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not killed and process.name().startswith("ray::RayTrainW"):
                process.kill()
                killed.append(process.pid)


def steps(run: Path = Path("run")) -> int:
    """Return the number of steps in the log of a run."""
    path = run / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
def test_stopped_training_with_a_killed_worker_takes_the_steps_of_one_process(
    ray: Any,
    folder: Path,
    processes: Any,
    straight: tuple[Path, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model("run.yaml", overrides=[*ON_RAY, "backend.sharding=full"])

    stopped = when(lambda: steps() >= 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        model.train("rows.jsonl", run="run")
    stopped.join()
    after = steps()
    assert json.loads(Path("run/manifest.json").read_text("utf8"))["status"] == "interrupted"
    assert 2 <= after < 12

    pids: list[int] = []
    killed = when(lambda: steps() >= min(after + 2, 11), lambda: kill_worker(pids))
    result = model.train("rows.jsonl", run="run")
    killed.join()

    assert (result.run, result.steps) == (Path("run"), 12)
    assert result.resumed_from is not None
    gone = (
        f"(process {pids[0]} on {os.uname().nodename}) is gone; all are restarted from the newest checkpoint (1 of 3 "
    )
    assert gone in caplog.text
    for key, exact in (("step", True), ("batch_hash", True), ("rows", True), ("loss", False)):
        one, other = ([line[key] for line in processes.log(place)] for place in (folder, straight[0]))
        assert one == other if exact else one == pytest.approx(other, rel=2e-4)
    assert result.metrics["test"] == pytest.approx(straight[1]["train:12"]["metrics"]["test"], rel=1e-3)

    manifest = json.loads(Path("run/manifest.json").read_text("utf8"))
    assert manifest["numbers_of_a_process"] < 0.6 * manifest["parameters"]
    assert model._backend.context.weights == Path("run/model"), "the weights for predictions"
    assert model.train(run="run").steps == 12, "finished, and not trained again"
    assert not list(Path("run").glob(".ray-*"))


def test_an_error_of_one_rank_is_raised_unchanged_and_nothing_is_restarted(
    ray: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("balls.py").write_text(COLLATE, encoding="utf8")
    model = Model("run.yaml", overrides=[*ON_RAY, "data.collate=balls:Failing"])
    frame = pd.read_json("rows.jsonl", lines=True)

    with pytest.raises(DataError) as error:
        model.train(frame, run="run")

    assert str(error.value) == "no such ball"
    assert error.value.__notes__[0].startswith(f"raised in rank 1 on {os.uname().nodename}:\nTraceback")
    assert "is gone" not in caplog.text
    manifest = json.loads(Path("run/manifest.json").read_text("utf8"))
    assert manifest["status"] == "failed", "rank 0 must not wait for rank 1"
    assert manifest["data"]["training"]["rows"] == 101
