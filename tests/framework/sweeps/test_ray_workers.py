"""Tests of sweeps on a real Ray on this machine: the trials of local workers, also after kills."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita import Sweep
from partita.sweeps.ray_workers import HostRequest, TrialHost
from partita_schema.errors import PartitaError

from ...distributed.moments import when
from ...forks import ENVIRONMENT
from ...json_lines import log_of
from ...local_ray import local_ray
from .small_sweeps import COMMAND, steps_of, sweep, trials_of, write_file

pytestmark = pytest.mark.long
ON_RAY = "backend={type: ray, workers: 2}"


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Start Ray on this machine."""
    with local_ray() as ray:
        yield ray


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def whole(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a file, where a local worker has run its sweep in `alone`."""
    folder = tmp_path_factory.mktemp("whole")
    pruner = {"type": "median", "startup_trials": 2}
    file = write_file(colours, folder, trials=5, pruner=pruner, steps_per_checkpoint=1)
    done = sweep(file, "--folder", folder / "alone", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def losses_of(folder: Path) -> list[list[float]]:
    """Return the losses of all steps of each trial."""
    return [[line["loss"] for line in log_of(folder / one["run"])] for one in trials_of(folder)]


def kill_workers(killed: list[int]) -> None:
    """Kill the Ray workers that run trials with SIGKILL."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::TrialHost"):
                process.kill()
                killed.append(process.pid)


def test_a_sweep_on_ray_with_killed_workers_has_the_trials_of_one_local_worker(
    ray: Any, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    killing = when(lambda: steps_of(tmp_path / "ray", 3), lambda: kill_workers(killed))
    result = Sweep(whole / "colours.yaml", overrides=[ON_RAY]).run(folder=tmp_path / "ray")
    killing.join()
    assert killed
    assert f" on {os.uname().nodename}) is gone; trial " in caplog.text
    assert " continues on another one (1 of 3 times)" in caplog.text
    assert trials_of(tmp_path / "ray") == trials_of(whole / "alone")
    assert losses_of(tmp_path / "ray") == losses_of(whole / "alone")
    assert result.best is not None
    assert result.best.number == json.loads((whole / "alone" / "sweep.json").read_text())["best"]["number"]
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "ray").glob("trials/*/manifest.json")]
    assert any(manifest.get("resumed") for manifest in manifests)


def test_a_killed_sweep_continues_on_ray_and_on_local_workers_in_turn(whole: Path, tmp_path: Path) -> None:
    file, folder = whole / "colours.yaml", tmp_path / "killed"
    for words in (["--set", ON_RAY], ["--workers", "2"]):
        ended = len(list(folder.glob("trials/*/trial.json")))
        program = subprocess.Popen(
            [*COMMAND, str(file), "--folder", str(folder), *words], cwd=whole, env=os.environ | ENVIRONMENT
        )
        while len(list(folder.glob("trials/*/trial.json"))) <= ended or not steps_of(folder, 3):
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait()
    done = sweep(file, "--folder", folder, "--set", ON_RAY, "--workers", "1", folder=whole)
    assert done.returncode == 0, done.stderr
    assert "1 worker on Ray" in done.stderr
    assert trials_of(folder) == trials_of(whole / "alone")
    assert losses_of(folder) == losses_of(whole / "alone")


def test_an_interrupted_sweep_on_ray_saves_its_trials(colours: Any, tmp_path: Path) -> None:
    file, folder = write_file(colours, tmp_path), tmp_path / "sweep"
    words = ["--set", "trainer.epochs=20", "--set", "trainer.steps_per_checkpoint=1000", "--set", ON_RAY]
    program = subprocess.Popen(
        [*COMMAND, str(file), "--folder", str(folder), *words], cwd=tmp_path, env=os.environ | ENVIRONMENT
    )
    while not steps_of(folder, 2):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    assert program.wait(timeout=100) == 130
    statuses = [json.loads(path.read_text())["status"] for path in folder.glob("trials/*/manifest.json")]
    assert "interrupted" in statuses
    assert "running" not in statuses


def test_a_trial_of_cross_validation_trains_all_folds_of_passed_rows_on_a_worker(
    ray: Any, colours: Any, tmp_path: Path
) -> None:
    config = colours.config(
        trainer={"epochs": 1, "evaluate_generated": False},
        sweep={"parameters": {"trainer.learning_rate": [0.01, 0.001]}, "sampler": "grid"},
        backend={"type": "ray", "workers": 2},
    )
    config["data"]["split"] = {"type": "kfold", "folds": 2}
    result = Sweep(config, quiet=True).run(colours.rows(64), folder=tmp_path)
    assert [trial.result.state for trial in result.trials if trial.result is not None] == ["done", "done"]
    for trial in result.trials:
        folds = json.loads((result.run_of(trial) / "folds.json").read_text())
        assert result.value_of(trial) == folds["metrics"]["validation"]["loss"]
        assert len(folds["folds"]) == 2


def test_a_worker_that_sees_another_folder_ends_the_sweep_with_the_reason(
    ray: Any, colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()

    def other_folder(folder: Path, token: str, start: Path, *, threads: str) -> HostRequest:
        return HostRequest(tmp_path / "elsewhere", token, start, threads)

    monkeypatch.setattr("partita.sweeps.ray_workers.HostRequest", other_folder)
    file = write_file(colours, tmp_path)
    with pytest.raises(PartitaError) as caught:
        Sweep(file, overrides=[ON_RAY]).run(folder=tmp_path / "sweep")
    assert str(caught.value) == (
        f"the folder of the sweep, {tmp_path / 'elsewhere'}, is another one on {os.uname().nodename}: name one with "
        "--folder that all machines of the cluster see under this name"
    )


def test_without_a_machine_for_a_worker_the_sweep_ends_and_says_what_there_is(
    ray: Any, colours: Any, tmp_path: Path
) -> None:
    file = write_file(colours, tmp_path)
    taken = [ray.remote(num_cpus=4)(TrialHost).remote() for _ in range(2)]
    with pytest.raises(PartitaError) as caught:
        Sweep(file, overrides=[ON_RAY, "backend.timeout_seconds=3"]).run(folder=tmp_path / "sweep")
    for actor in taken:
        ray.kill(actor)
    assert str(caught.value) == (
        "no worker has started for 3 s (backend.timeout_seconds). In all there are 8 CPUs, 0 GPUs: add machines, or "
        "write a longer time; rerun the same command to continue"
    )
