"""Tests of training on Ray: the same steps as in one process, also after deaths, and unchanged errors."""

import importlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from partita import DataError, Model
from partita.backends.ray.rank_launcher import received

from ..json_lines import read_json_lines, write_json_lines
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
    assert manifest["parameters_per_process"] < 0.6 * manifest["parameters"]
    assert model._backend.context.weights == Path("run/model"), "the weights for predictions"
    assert model.train(run="run").steps == 12, "finished, and not trained again"
    assert not list(Path("run").glob(".ray-*"))


def test_a_reward_model_is_trained_and_scores_as_in_one_process(ray: Any, folder: Path, processes: Any) -> None:
    settings = processes.settings(type="reward", max_steps=4, center=0.05)
    settings["output_features"] = [{"name": "answer", "type": "preference"}]
    del settings["adapter"], settings["generation"]
    for name in ("rows.jsonl", "more.jsonl"):
        rows = [
            {"text": row["text"], "chosen": f"a {row['colour']}", "rejected": "a ball I see"[: 3 + number % 10]}
            for number, row in enumerate(read_json_lines(folder / name))
        ]
        write_json_lines(folder / name, rows)

    results = [
        Model(settings, overrides=overrides, quiet=True).train(run=run)
        for overrides, run in (([], "alone"), (ON_RAY, "run"))
    ]

    logs = [read_json_lines(Path(run) / "log.jsonl") for run in ("alone", "run")]
    for key in ("loss", "rewards/margins", "rewards/rejected"):
        one, other = ([line[key] for line in log] for log in logs)
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6), key
    assert results[1].metrics["test"] == pytest.approx(results[0].metrics["test"], rel=5e-6, abs=1e-5)

    models = [Model.load("run", overrides=overrides, quiet=True) for overrides in ([], ON_RAY)]
    metrics = [model.evaluate("more.jsonl") for model in models]
    assert metrics[0] == metrics[1]
    assert metrics[1]["model"]["rewards/margins"] != 0
    scores = [list(model.predict("more.jsonl", f"scores-{number}.jsonl")) for number, model in enumerate(models)]
    assert scores[0] == scores[1]
    assert len({row["answer_score"] for row in scores[1]}) > 20


CALLBACKS = """
import os

class Diary:
    def __init__(self, name):
        self.name, self.calls = name, []

    def note(self, hook, state):
        self.calls.append(hook)
        with (state.run / self.name).open("a") as file:
            file.write(f"{hook} {state.step} on rank {os.environ['RANK']}\\n")

    def on_start(self, state):
        self.note("start", state)

    def on_step(self, state):
        self.note("step", state)
        if state.step == 4:
            state.stop("enough")

    def on_checkpoint(self, state):
        self.note("checkpoint", state)

    def on_end(self, state):
        self.note("end", state)
"""


def test_callbacks_of_the_file_and_of_the_caller_run_on_rank_0_and_stop_all_ranks(ray: Any, folder: Path) -> None:
    Path("diaries.py").write_text(CALLBACKS, encoding="utf8")
    calls = list[str]()

    class Passed:
        def on_step(self, state: Any) -> None:
            calls.append("step")
            Path(state.run, "passed.txt").write_text(f"{len(calls)} steps on rank {os.environ['RANK']}")

    own = "callbacks=[{type: custom, target: 'diaries:Diary', options: {name: file.txt}}]"
    model = Model("run.yaml", overrides=[*ON_RAY, own])

    result = model.train("rows.jsonl", run="run", callbacks=[Passed()])

    assert (result.steps, result.stopped_early) == (4, True)
    assert json.loads(Path("run/manifest.json").read_text("utf8"))["stopped_by"] == "Diary: enough"
    hooks = ["start 0", "step 1", "step 2", "step 3", "checkpoint 3", "step 4", "checkpoint 4", "end 4"]
    assert Path("run/file.txt").read_text().splitlines() == [f"{hook} on rank 0" for hook in hooks]
    assert Path("run/passed.txt").read_text() == "4 steps on rank 0"
    assert calls == [], "a copy was called"


def test_what_cannot_be_sent_to_workers_is_refused(ray: Any, folder: Path) -> None:
    model = Model("run.yaml", overrides=ON_RAY)

    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def on_step(self, state: Any) -> None: ...

    with pytest.raises(DataError) as error:
        model.train("rows.jsonl", run="other", callbacks=[Locked()])
    assert str(error.value) == (
        "the callback Locked cannot be sent to workers (cannot pickle '_thread.lock' object); create what it holds in "
        "on_start, or name Locked in the file, under callbacks"
    )
    with pytest.raises(DataError) as error:
        model.train([{"text": threading.Lock(), "colour": "red"}], run="other")
    assert str(error.value) == (
        "the dataset cannot be sent to workers (cannot pickle '_thread.lock' object); write it to a file, and name that"
    )


def test_an_object_whose_module_is_missing_on_a_worker_is_refused(
    ray: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("diaries.py").write_text(CALLBACKS, encoding="utf8")
    monkeypatch.syspath_prepend(str(folder))
    call = partial(print, callbacks=[importlib.import_module("diaries").Diary("passed.txt")])

    @ray.remote
    def refusal(sent: list[Any]) -> str:
        with pytest.raises(DataError) as error:
            received(sent[0])
        return str(error.value)

    assert ray.get(refusal.remote([ray.put(call)])) == (
        "an object that you passed cannot be read on a worker (No module named 'diaries'); the module of its class "
        "must be importable there"
    )


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


@pytest.mark.parametrize(("kind", "trained_on"), [("dpo", ON_RAY), ("kto", [])], ids=["dpo", "kto"])
def test_a_finished_run_on_preferences_is_evaluated_with_its_loss(
    ray: Any, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, trained_on: list[str]
) -> None:
    settings = processes.settings()
    del settings["adapter"]
    label = {"type": "text", "label": "good"} if kind == "kto" else {"type": "preference"}
    settings["output_features"] = [{"name": "answer", **label}]
    settings["trainer"] |= {"type": "kto" if kind == "kto" else "preference", "learning_rate": 0.003}
    monkeypatch.chdir(processes.prepare(tmp_path / "job", settings))
    for name in ("rows.jsonl", "more.jsonl"):
        rows = [
            {"text": row["text"], "chosen": row["colour"], "rejected": "a ball", "answer": row["colour"], "good": True}
            for row in read_json_lines(Path(name))
        ]
        rows = [row if index % 3 else row | {"answer": "a ball", "good": False} for index, row in enumerate(rows)]
        write_json_lines(Path(name), rows)
    trained = Model("run.yaml", overrides=trained_on, quiet=True).train(run="run").metrics["test"]
    Path("run", "references.jsonl").unlink()

    for overrides in ([], ON_RAY):
        metrics = Model.load("run", overrides=overrides, quiet=True).evaluate("more.jsonl")["model"]
        names = [name for name in metrics if name.partition("/")[0] in ("loss", "rewards", "logps", "kl")]
        assert "rewards/margins" in names
        found, expected = ({name: values[name] for name in names} for values in (metrics, trained))
        assert found == pytest.approx(expected, rel=1e-4)
