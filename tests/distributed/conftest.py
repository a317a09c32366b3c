"""Jobs of several processes on this machine."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

STEPS = ("train:12", "predict:more", "predict:few", "evaluate:more", "tune:more")
JOB = Path(__file__).with_name("job.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
COLOURS = ("red", "blue", "green")


def make_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Sentences of very different lengths that name a colour."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        colour = chance.choice(COLOURS)
        text = " ".join(["I see"] * chance.randint(1, 12) + [f"a {colour} ball"])
        rows.append({"id": f"{seed}-{number}", "text": text, "colour": colour})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def settings(**trainer: Any) -> dict[str, Any]:
    """A model that learns the colours in a few steps; four batches a step, with dropout."""
    return {
        "base_model": {
            "type": "scratch",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "context_length": 64,
            "tokenizer": "word",
            "vocab_size": 64,
        },
        "adapter": {"type": "lora", "r": 4, "dropout": 0.2},
        "model_parameters": {"neftune_noise_alpha": 5},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "colour", "type": "category"}],
        "generation": {"max_new_tokens": 4},
        "data": {
            "source": "rows.jsonl",
            "validation": "more.jsonl",
            "test": "more.jsonl",
            "batching": {"type": "bucket", "window": 32},
        },
        "trainer": {
            "type": "finetune",
            "batch_size": 4,
            "eval_batch_size": 8,
            "effective_batch_size": 16,
            "max_steps": 12,
            "learning_rate": 0.02,
            "learning_rate_scheduler": {"decay": "none"},
            "steps_per_checkpoint": 3,
            "steps_per_evaluation": 6,
            **trainer,
        },
    }


def prepare(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with rows and a file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", make_rows(101, seed=1))
    write_rows(folder / "more.jsonl", make_rows(37, seed=2))
    write_rows(folder / "few.jsonl", make_rows(2, seed=3))
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
    return folder


class Jobs:
    """Jobs of several ranks, all of them forks of one process that has imported the libraries."""

    settings = staticmethod(settings)
    prepare = staticmethod(prepare)
    environment = ENVIRONMENT

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(JOB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def run(self, ranks: int, folder: Path, *steps: str, kill: dict[str, Any] | None = None) -> list[int]:
        """The exit status of every rank."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"ranks": ranks, "folder": str(folder), "steps": steps, "kill": kill}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found: list[int] = json.loads(self.process.stdout.readline())
        return found

    def start(self, ranks: int, folder: Path, *steps: str) -> dict[str, Any]:
        """What a job of so many ranks comes to."""
        if any(self.run(ranks, folder, *steps)):
            raise AssertionError(self.end())
        found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf8"))
        return found

    def end(self) -> str:
        """What was said on standard error."""
        return self.process.communicate()[1]

    @staticmethod
    def log(folder: Path) -> list[dict[str, Any]]:
        """The steps of a run."""
        return [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text("utf8").splitlines()]


@pytest.fixture(scope="session")
def processes() -> Iterator[Jobs]:
    """What starts jobs."""
    jobs = Jobs()
    yield jobs
    jobs.end()


@pytest.fixture(scope="session")
def straight(processes: Jobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and results of a job that one process has done without a stop."""
    folder = processes.prepare(tmp_path_factory.mktemp("straight") / "job", processes.settings())
    return folder, processes.start(1, folder, *STEPS)
