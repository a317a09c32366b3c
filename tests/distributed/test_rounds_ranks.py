"""Tests of self-training on several processes: the same dialogues and steps, also after a kill."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..seeds import session_seed
from ..self_training import fill, settings

pytestmark = pytest.mark.long

DIALOGUES = 24


@pytest.fixture
def folder(processes: Any, tmp_path: Path) -> Path:
    """Return a folder with a configuration: two rounds of 24 greedy dialogues and six steps of two batches."""
    fill(tmp_path)
    trainer = {"batch_size": 4, "effective_batch_size": 8, "learning_rate": 0.003, "steps_per_checkpoint": 2}
    file = settings(
        base_model=processes.settings()["base_model"],
        generation={},
        trainer=trainer,
        tasks={"count": DIALOGUES},
        select="all",
        guard=1.0,
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")
    return tmp_path


def left(folder: Path) -> tuple[list[bytes], list[list[str]]]:
    """Return the transcripts of all rounds, and the batch hashes of all steps."""
    run = folder / "run"
    transcripts = [
        (run / "rounds" / str(number) / "transcripts" / "predicted.jsonl").read_bytes() for number in (1, 2, 3)
    ]
    logs = [run / "log.jsonl", *(run / "rounds" / str(number) / "log.jsonl" for number in (1, 2))]
    return transcripts, [
        [json.loads(line)["batch_hash"] for line in log.read_text("utf8").splitlines()] for log in logs
    ]


@pytest.mark.long
def test_rounds_equal_those_of_one_process_also_after_a_rank_was_killed(processes: Any, folder: Path) -> None:
    other = folder.parent / "several"
    shutil.copytree(folder, other)
    processes.start(1, folder, "train:8")
    seed = session_seed()
    rng = random.Random(seed)
    for pattern, lines in (("run/rounds/1/transcripts/.*.jsonl", 6), ("run/rounds/2/log.jsonl", 3)):
        rank = rng.randrange(2)
        status = processes.kill(2, other, "train:8", rank=rank, pattern=pattern, lines=lines, delay=0.01)
        assert status[rank] == -signal.SIGKILL, f"seed {seed}: {status}"
    result = processes.start(2, other, "train:8")["train:8"]

    assert result["steps"] == 8 + 6 + 6
    assert left(other) == left(folder), f"seed {seed}"
    assert not list(other.glob("run/rounds/*/transcripts/.*rank-*"))


def test_rounds_with_sharded_weights_equal_those_of_one_process(processes: Any, folder: Path) -> None:
    other = folder.parent / "shared"
    shutil.copytree(folder, other)
    processes.start(1, folder, "train:8")
    file = yaml.safe_load((other / "run.yaml").read_text("utf8"))
    file["backend"] = {"type": "torchrun", "sharding": "full"}
    (other / "run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")
    result = processes.start(2, other, "train:8")["train:8"]

    assert result["steps"] == 8 + 6 + 6
    assert left(other) == left(folder)
    for run in ("run", "run/rounds/1", "run/rounds/2"):
        manifest = json.loads((other / run / "manifest.json").read_text("utf8"))
        assert manifest["parameters_per_process"] < 0.7 * manifest["parameters"], "each rank has half of the weights"
