"""Fixtures for jobs with several processes on this machine."""

import json
import os
import random
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..forks import Fork, Forks
from ..json_lines import read_json_lines, write_json_lines

STEPS = ("train:12", "predict:more", "predict:few", "evaluate:more", "tune:more")
JOB = Path(__file__).with_name("job.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
COLOURS = ("red", "blue", "green")


def make_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return sentences of very different lengths that contain a colour."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        colour = rng.choice(COLOURS)
        text = " ".join(["I see"] * rng.randint(1, 12) + [f"a {colour} ball"])
        rows.append({"id": f"{seed}-{number}", "text": text, "colour": colour})
    return rows


def settings(**trainer: Any) -> dict[str, Any]:
    """Return a configuration that learns the colours in a few steps, with four batches per step and dropout."""
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
    """Write rows and a configuration into a folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_lines(folder / "rows.jsonl", make_rows(101, seed=1))
    write_json_lines(folder / "more.jsonl", make_rows(37, seed=2))
    write_json_lines(folder / "few.jsonl", make_rows(2, seed=3))
    (folder / "few.jsonl").write_text("{broken\n" + (folder / "few.jsonl").read_text("utf8") + "{cut", "utf8")
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
    return folder


def lines_in(folder: Path, pattern: str) -> int:
    """Return the number of lines in all files of a pattern; a file removed meanwhile counts as empty."""
    total = 0
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            total += path.read_bytes().count(b"\n")
    return total


class Jobs:
    """Starts jobs of several ranks, each a fork of a process that has imported the libraries."""

    settings = staticmethod(settings)
    prepare = staticmethod(prepare)
    environment = ENVIRONMENT

    def __init__(self, forks: Forks) -> None:
        self.forks = forks

    def launch(self, ranks: int, folder: Path, *steps: str) -> list[Fork]:
        """Start a process for each rank; a single rank gets no variables of a launcher."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        code = JOB.read_text(encoding="utf8")
        places = [place | {"RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
        return [
            self.forks.start(code, JOB.name, folder, *steps, folder=folder, environment=ENVIRONMENT | place)
            for place in places
        ]

    def start(self, ranks: int, folder: Path, *steps: str) -> dict[str, Any]:
        """Run a job with `ranks` ranks; return its results."""
        job = self.launch(ranks, folder, *steps)
        errors = [rank.communicate()[1] for rank in job]
        assert not any(rank.returncode for rank in job), "\n".join(errors)
        result: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf8"))
        return result

    def kill(
        self, ranks: int, folder: Path, *steps: str, rank: int, pattern: str, lines: int, delay: float
    ) -> list[int]:
        """Kill a rank `delay` seconds after files of the pattern have `lines` lines; return the exit codes of the job.

        The other ranks are terminated, as a launcher does. If the rank ends before that, none is.
        """
        job = self.launch(ranks, folder, *steps)
        while lines_in(folder, pattern) < lines and job[rank].poll() is None:
            time.sleep(0.001)
        if job[rank].poll() is None:
            time.sleep(delay)
            job[rank].send_signal(signal.SIGKILL)
            time.sleep(0.1)
            for other in job:
                other.send_signal(signal.SIGTERM)
        return [one.wait() for one in job]

    @staticmethod
    def log(folder: Path) -> list[dict[str, Any]]:
        """Return the logged steps of a run."""
        return read_json_lines(folder / "run" / "log.jsonl")


@pytest.fixture(scope="session")
def processes(forks: Forks) -> Jobs:
    """Return an object that starts jobs."""
    return Jobs(forks)


@pytest.fixture(scope="session")
def straight(processes: Jobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return folder and results of an uninterrupted job of one process."""
    folder = processes.prepare(tmp_path_factory.mktemp("straight") / "job", processes.settings())
    return folder, processes.start(1, folder, *STEPS)
