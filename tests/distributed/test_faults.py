"""Tests of failing and killed processes: the job ends in seconds with a clear error, and the next start resumes."""

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..forks import COMMAND, Fork, Forks
from ..json_lines import write_json_lines
from ..seeds import session_seed

pytestmark = pytest.mark.long

TWO = ("--set", "backend.type=torchrun", "--set", "backend.processes=2")

COLLATE = """
import os
from partita.data.batching.collate import collate

class Failing:
    calls = 0

    def __call__(self, encoded, planned, pad_token_id):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 5:
            raise ValueError("no such ball")
        return collate(encoded, planned, pad_token_id=pad_token_id)
"""

TRAINER = """
import os
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers import Finetune
from partita_trainers.objective import CrossEntropy

class Failing(CrossEntropy):
    calls = 0

    def loss(self, context, batch):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 5:
            raise ValueError("no such ball")
        return super().loss(context, batch)

class FailingTrainer(Finetune):
    def __init__(self, section):
        super().__init__(FinetuneTrainer(type="finetune", epochs=3), objective=Failing())
"""


def command(folder: Path, environment: dict[str, str], *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "partita", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


Job = subprocess.Popen[str] | Fork


def ended(job: Job) -> tuple[int, str]:
    """Return the exit code and all output."""
    said, errors = job.communicate(timeout=120)
    return job.returncode, said + errors


def rank_of(job: Job, rank: int) -> psutil.Process:
    """Return the process of a rank."""
    for child in psutil.Process(job.pid).children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError("there is no such process")


def wait_for(condition: Callable[[], bool], job: Job) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.002)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_an_unexpected_error_of_one_rank_ends_the_job_and_is_reported(processes: Any, tmp_path: Path) -> None:
    settings = processes.settings() | {"trainer": {"type": "custom", "target": "balls:FailingTrainer", "batch_size": 4}}
    folder = processes.prepare(tmp_path / "job", settings)
    (folder / "balls.py").write_text(TRAINER, encoding="utf8")

    code, said = ended(command(folder, processes.environment, "train", "run.yaml", "--run", "run", *TWO))

    assert code == 1
    assert "ValueError: no such ball" in said
    assert said.count("Traceback") == 1
    manifest = json.loads((folder / "run" / "manifest.json").read_text(encoding="utf8"))
    assert (manifest["status"], manifest["error"]) == ("failed", "rank 1 failed: ValueError: no such ball")


def test_an_error_in_a_users_class_on_one_rank_is_a_sentence(forks: Forks, processes: Any, tmp_path: Path) -> None:
    settings = processes.settings()
    settings["data"]["collate"] = "balls:Failing"
    folder = processes.prepare(tmp_path / "job", settings)
    (folder / "balls.py").write_text(COLLATE, encoding="utf8")

    code, said = ended(forks.start(COMMAND, "partita", "train", "run.yaml", "--run", "run", *TWO, folder=folder))

    assert code == 2
    sentence = "data.collate: balls:Failing raised ValueError: no such ball (balls.py, line 11)"
    assert said.count(f"error: {sentence}") == 1, said
    assert "Traceback" not in said
    manifest = json.loads((folder / "run" / "manifest.json").read_text(encoding="utf8"))
    assert (manifest["status"], manifest["error"]) == ("failed", f"rank 1 failed: DataError: {sentence}")


def test_an_error_in_the_data_is_reported_once_and_with_its_exit_code(
    forks: Forks, processes: Any, tmp_path: Path
) -> None:
    folder = processes.prepare(tmp_path / "job", processes.settings())
    (folder / "rows.jsonl").write_text('{"text": "no colour"}\n', encoding="utf8")

    code, said = ended(forks.start(COMMAND, "partita", "train", "run.yaml", "--run", "run", *TWO, folder=folder))

    assert code == 2
    assert said.count("rows.jsonl has no column 'colour'") == 1, said


def test_a_killed_rank_ends_the_job_with_advice(forks: Forks, processes: Any, tmp_path: Path) -> None:
    folder = processes.prepare(tmp_path / "job", processes.settings(max_steps=10_000))
    job = forks.start(COMMAND, "partita", "train", "run.yaml", "--run", "run", *TWO, folder=folder)
    wait_for(lambda: lines_of(folder / "run" / "log.jsonl") >= 2, job)

    rank_of(job, 1).send_signal(signal.SIGKILL)
    code, said = ended(job)

    assert code == 1
    assert said.splitlines()[-1] == (
        "error: rank 1 was ended by SIGKILL, and the others with it; rerun the same command to resume from what is "
        "saved"
    )
    assert said.count("error: ") == 1, said
    assert "interrupt again" not in said
    assert "Traceback" not in said


def killed(rng: random.Random, ranks: int, pattern: str, lines: range) -> dict[str, Any]:
    """Return which rank is killed, and when."""
    rank, when = rng.randrange(ranks), rng.choice(lines)
    return {"rank": rank, "pattern": pattern, "lines": when, "delay": rng.uniform(0, 0.03)}


def test_training_with_killed_ranks_equals_uninterrupted_training(
    processes: Any, straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    folder = processes.prepare(tmp_path / "job", processes.settings())

    for ranks, lines in ((2, range(1, 5)), (4, range(4, 8)), (2, range(7, 12))):
        kill = killed(rng, ranks, "run/log.jsonl", lines)
        status = processes.kill(ranks, folder, "train:12", **kill)
        assert status[kill["rank"]] == -signal.SIGKILL, f"seed {seed}: {status}"
        assert all(status), f"seed {seed}: no rank succeeds after a kill"
    result = processes.start(2, folder, "train:12")["train:12"]

    assert result["resumed_from"] is not None, f"seed {seed}"
    assert processes.log(folder)[-1]["step"] == 12
    for key, exact in (("batch_hash", True), ("rows", True), ("loss", False)):
        one, other = ([line[key] for line in processes.log(place)] for place in (folder, straight[0]))
        assert one == other if exact else one == pytest.approx(other, rel=2e-4), f"seed {seed}"
    accuracy = [results["metrics"]["test"] for results in (result, straight[1]["train:12"])]
    assert accuracy[0] == pytest.approx(accuracy[1], rel=1e-3), f"seed {seed}"


def rows_in(journals: Path) -> set[int]:
    """Return the rows with a complete record. A kill while journals are merged leaves a row in two of them."""
    lines = [line for path in journals.glob("many*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {record["row"] for record in records if "row" in record}


def test_predictions_with_killed_ranks_are_complete_and_unchanged(
    processes: Any, straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    folder = tmp_path / "job"
    shutil.copytree(straight[0], folder)
    # All prompts differ: equal prompts would be answered once.
    texts = [" ".join(words) for words in itertools.product(("red", "blue", "green", "ball"), repeat=5)][:1000]
    rows = [{"text": text, "number": number} for number, text in enumerate(texts)]
    write_json_lines(folder / "many.jsonl", rows)
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    processes.start(1, alone, "predict:many")

    done = 0
    for ranks in (3, 2):
        kill = killed(rng, ranks, "run/journal/many*.jsonl", range(done + 5, done + 60))
        status = processes.kill(ranks, folder, "predict:many", **kill)
        assert status[kill["rank"]] == -signal.SIGKILL, f"seed {seed}: {status}"
        assert not (folder / "many.out.jsonl").exists()
        done = len(rows_in(folder / "run" / "journal"))
    result = processes.start(2, folder, "predict:many")["predict:many"]

    assert result["rows"] == 1000
    assert result["resumed"] == done, f"seed {seed}"
    assert (folder / "many.out.jsonl").read_bytes() == (alone / "many.out.jsonl").read_bytes(), f"seed {seed}"
    assert not list(folder.glob("run/journal/*.rank-*"))
