"""Tests of Hogwild training of a bag of words, from configuration to answers, and with stopped or killed processes."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml
from safetensors.torch import load_file

from partita import Model
from partita.runs.directory import RunDirectory
from partita_schema.errors import ConfigError, PartitaError, ResumeError, TrainingError
from partita_trainers.hogwild import trainer as hogwild
from partita_trainers.hogwild import workers as hogwild_workers
from partita_trainers.process_group import ProcessGroup

from ..forks import COMMAND, Forks
from ..json_lines import read_json_lines, write_json_lines
from .serving.conftest import running

KEYS = {"sport": ("goal", "match", "run"), "music": ("song", "band", "tune"), "good food": ("soup", "bread", "meal")}
FILLING = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ai", "ra", "no")]

pytestmark = pytest.mark.long


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Return texts of made-up words, one of which determines the topic."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        topic = chance.choice(sorted(KEYS))
        words = chance.choices(FILLING, k=chance.randint(3, 12))
        words.insert(chance.randrange(len(words)), chance.choice(KEYS[topic]))
        rows.append({"title": chance.choice(FILLING), "text": " ".join(words), "topic": topic})
    return rows


def make_settings(folder: Path, *, scoring: bool = True, **trainer: Any) -> dict[str, Any]:
    return {
        "base_model": {"type": "embedding_bag", "embedding_dim": 16, "buckets": 2000},
        "input_features": [{"name": "title"}, {"name": "text"}],
        "output_features": [{"name": "topic", "type": "category", "decoder": {"scoring": scoring}}],
        "data": {"source": str(folder / "rows.jsonl")},
        "trainer": {"type": "hogwild", "workers": 2, "epochs": 4, "batch_size": 8, **trainer},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("hogwild")
    write_json_lines(result / "rows.jsonl", make_rows(1200))
    return result


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Return a run trained by two workers."""
    model = Model(make_settings(folder), quiet=True)
    result = model.train(run=folder / "two")
    assert result.steps == 4 * 135
    assert result.metrics["test"]["topic.accuracy"] > 0.95
    return result.run


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_json_lines(run / "log.jsonl")


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(process: int) -> list[int]:
    """Return the workers of a process. Its fork server starts them."""
    started = psutil.Process(process).children()
    servers = [child for child in started if "multiprocessing.forkserver" in " ".join(child.cmdline())]
    return [worker.pid for server in servers for worker in server.children()]


def wait_for_end(processes: list[int]) -> None:
    """Wait until all processes have ended; fail if one does not."""
    deadline = time.monotonic() + 30
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, "a worker outlived the run"
        time.sleep(0.05)


def test_rows_with_an_unknown_label_are_left_out_of_the_evaluation(trained: Path) -> None:
    rows = make_rows(20, seed=4)
    metrics = Model.load(trained, quiet=True).evaluate([*rows, {**rows[0], "topic": "weather"}])
    assert (metrics["topic"]["n"], metrics["topic"]["skipped"]) == (20, 1)


def test_no_progress_is_shown_while_the_workers_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("partita.runs.progress.LINE_EVERY_SECONDS", 0.0)
    Model(make_settings(folder, epochs=1)).train(run=tmp_path / "run")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training ")]
    assert lines
    assert not [line for line in lines if line.startswith("training 0/")]


def test_a_model_trained_by_two_workers_can_predict(trained: Path, tmp_path: Path) -> None:
    log = lines_of(trained)
    assert [line["step"] for line in log] == [135, 270, 405, 540]
    assert [line["rows"] for line in log] == [1080] * 4
    assert log[-1]["loss"] < log[0]["loss"] / 5
    manifest = json.loads((trained / "manifest.json").read_text(encoding="utf8"))
    assert (manifest["status"], manifest["workers"]) == ("done", 2)
    assert manifest["batches"].keys() == {"rows", "seconds"}
    assert (manifest["batches"]["rows"], "waits" in manifest) == (4 * 1080, False)
    model = Model.load(trained, quiet=True)
    rows = make_rows(200, seed=5)
    predictions = model.predict(rows, output=tmp_path / "answers.jsonl")
    assert sum(row["topic"] == row["topic_input"] for row in predictions) > 190
    for row in predictions:
        shares = row["topic_probabilities"]
        assert sum(shares.values()) == pytest.approx(1)
        assert row["topic_probability"] == max(shares.values()) == shares[row["topic"]]
    metrics = model.evaluate(rows)
    assert metrics["topic"]["accuracy"] == sum(row["topic"] == row["topic_input"] for row in predictions) / 200
    assert metrics["model"]["loss"] < 0.2
    again = model.predict(rows, output=tmp_path / "answers.jsonl")
    assert again.stats.resumed == 200


def test_a_saved_bag_is_loaded_from_its_folder(trained: Path, tmp_path: Path) -> None:
    model = Model.load(trained, quiet=True)
    rows = make_rows(30, seed=6)
    model.save(tmp_path / "saved")
    there = Model.load(tmp_path / "saved", quiet=True).predict(rows, output=tmp_path / "there.jsonl")
    here = model.predict(rows, output=tmp_path / "here.jsonl")
    assert [row["topic_probabilities"] for row in there] == [row["topic_probabilities"] for row in here]


def test_the_model_card_of_a_sparse_classifier_names_partita_as_its_library(trained: Path, tmp_path: Path) -> None:
    Model.load(trained, quiet=True).push_to_hub("somebody/topics", dry_run=tmp_path / "dry")
    page = (tmp_path / "dry" / "README.md").read_text(encoding="utf8")
    assert page.startswith("---\nlibrary_name: partita\npipeline_tag: text-classification\ntags:\n- partita\n")
    assert "transformers import" not in page
    assert "| topic.accuracy | " in page


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_a_served_bag_continues_no_text(trained: Path, prompt: Any) -> None:
    with running(Model.load(trained, quiet=True), engine={"context": None, "batch_size": None}) as server:
        response = httpx2.post(f"{server.url}/v1/completions", json={"prompt": prompt}, timeout=30)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "the model writes no text; send rows to /predict"


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (
            lambda model: model.generate("a text"),
            (
                "there is nothing to generate with base_model: {type: embedding_bag}: it writes no text; predict "
                "answers rows with labels"
            ),
        ),
        (
            lambda model: model.tune(),
            "there is nothing to tune with base_model: {type: embedding_bag}: its batch sizes are numbers in the file",
        ),
        (
            lambda model: model.simulate(),
            (
                "there is nothing to simulate with base_model: {type: embedding_bag}: it has no dialogues; write a "
                "language model as base_model"
            ),
        ),
        (
            lambda model: model.export("merged", "nowhere"),
            "there is nothing to export with base_model: {type: embedding_bag}: only partita reads its files",
        ),
    ],
    ids=["generate", "tune", "simulate", "export"],
)
def test_methods_for_language_models_are_refused(trained: Path, verb: Any, text: str) -> None:
    with pytest.raises(PartitaError) as caught:
        verb(Model.load(trained, quiet=True))
    assert str(caught.value) == text


def test_a_stopped_and_killed_run_of_one_worker_equals_an_uninterrupted_one(
    folder: Path, tmp_path: Path, forks: Forks
) -> None:
    settings = make_settings(folder, workers=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    straight = Model(settings, quiet=True).train(run=tmp_path / "straight")
    killed = tmp_path / "killed"
    for number, lines in ((signal.SIGKILL, 1), (signal.SIGINT, 2)):
        program = forks.start(COMMAND, "partita", "train", "run.yaml", "--run", killed, "--quiet", folder=tmp_path)
        while not (killed / "log.jsonl").exists() or len(lines_of(killed)) < lines:
            assert program.poll() is None, program.communicate()
            time.sleep(0.001)
        workers = children(program.pid)
        assert len(workers) == 1
        program.send_signal(number)
        program.communicate()
        wait_for_end(workers)
    steps = sorted(path.name for path in (killed / "checkpoints").iterdir())
    result = Model(settings, quiet=True).train(run=killed)
    assert result.resumed_from is not None
    assert steps == [f"step-{result.resumed_from:06d}"]
    assert result.metrics == straight.metrics
    one, other = (load_file(run / "model" / "model.safetensors") for run in (killed, straight.run))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_a_killed_worker_ends_the_run_which_can_resume(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(folder)
    results: list[Any] = []
    log = hogwild.HogwildRun.log

    def kill_after_an_epoch(training: hogwild.HogwildRun, *args: Any, **kwargs: Any) -> None:
        log(training, *args, **kwargs)
        if not results:
            results.extend(children(os.getpid()))
            os.kill(results[1], signal.SIGKILL)

    monkeypatch.setattr(hogwild.HogwildRun, "log", kill_after_an_epoch)
    with pytest.raises(TrainingError) as caught:
        Model(settings, quiet=True).train(run=tmp_path / "run")
    assert str(caught.value) in {
        f"hogwild's worker {number} was ended by SIGKILL; train again with the same --run to resume from the last "
        "checkpoint"
        for number in (0, 1)
    }
    assert len(results) == 2
    wait_for_end(results)
    result = Model(settings, quiet=True).train(run=tmp_path / "run")
    assert result.resumed_from == 135
    assert result.metrics["test"]["topic.accuracy"] > 0.95


def test_an_error_in_a_worker_is_raised_with_its_location(folder: Path, tmp_path: Path) -> None:
    settings = make_settings(folder, workers=1, optimizer={"type": "sgd"}, learning_rate=1e30)
    with pytest.raises(TrainingError) as caught:
        Model(settings, quiet=True).train(run=tmp_path / "run")
    first, *trace = str(caught.value).splitlines()
    assert first.startswith("hogwild's worker 0 failed: FloatingPointError: the loss of step ")
    assert first.endswith(" is not a number; write a lower trainer.learning_rate")
    assert any("train_epoch" in line for line in trace)
    assert not children(os.getpid())


def test_the_progress_of_training_begins_when_the_workers_have_started(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    answers, progress = hogwild_workers.HogwildWorkers.answers, RunDirectory.progress

    def waited(workers: Any, **named: Any) -> float:
        seconds = answers(workers, **named)
        events.append("answers")
        return seconds

    def shown(run: RunDirectory, total: int, description: str, **named: Any) -> Any:
        events.append(description)
        return progress(run, total, description, **named)

    monkeypatch.setattr(hogwild_workers.HogwildWorkers, "answers", waited)
    monkeypatch.setattr(RunDirectory, "progress", shown)
    Model(make_settings(folder, workers=1, epochs=1), quiet=True).train(run=tmp_path / "run")
    assert events.index("answers") < events.index("training")


def test_other_rows_are_refused_on_resume(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text((folder / "rows.jsonl").read_text(encoding="utf8"), encoding="utf8")
    settings = make_settings(tmp_path, workers=1, epochs=1)
    Model(settings, quiet=True).train(run=tmp_path / "run")
    with (tmp_path / "rows.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps(make_rows(1, seed=9)[0]) + "\n")
    with pytest.raises(ResumeError, match="files"):
        Model(make_settings(tmp_path, workers=1, epochs=2), quiet=True).train(run=tmp_path / "run")


def test_several_processes_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(ProcessGroup):
        world_size = 2

    trainer = hogwild.Hogwild(Model(make_settings(folder)).config.trainer)  # type: ignore[arg-type]
    work = type("Context", (), {"process_group": Two()})()
    with pytest.raises(ConfigError) as caught:
        trainer.train(work)
    assert str(caught.value) == (
        "trainer.type: hogwild starts its workers itself, and here are 2 processes; start one, and write "
        "trainer.workers"
    )


def test_too_little_shared_memory_is_reported_before_it_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 2**20 // 10

    monkeypatch.setattr(hogwild_workers.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(TrainingError, match=r"hogwild needs \d MiB of shared memory, and /dev/shm has 0 free; give"):
        Model(make_settings(folder), quiet=True).train(run=tmp_path / "run")
