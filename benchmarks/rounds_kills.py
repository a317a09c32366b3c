"""Twenty SIGKILLs at random moments of three rounds of 400 dialogues and training, beside a job that nobody kills.

A new model, sampled answers, two turns a dialogue, 8 steps on data and 10 in each round, one thread. Each attempt is a
process of its own, forked behind the imports, and is killed when it has come to a drawn place, a moment later: two
before the rounds, and in each round three among its dialogues and three among its steps. In the end transcripts, the
rows and losses of every step, and all weights are compared.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import import_all
from harness import ROOT, Limit, about, parse_arguments, report

PROGRAMS = ROOT / "tests" / "framework" / "simulation" / "worlds_of_tests.py"
ROUNDS = 3


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    dialogues, each = (80, 1) if arguments.quick else (400, 3)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    import_all()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        shutil.copy(PROGRAMS, name)
        write_rows(Path("rows.jsonl"))
        attempt("straight", dialogues)
        wanted = places(chance, dialogues, each=each)
        had = [place for place in wanted if attempt("killed", dialogues, place=place)]
        attempt("killed", dialogues)
        differences = compare(Path("straight"), Path("killed"))
    names = [place.name for place in had]
    table = [
        {
            "kills": len(had),
            "before the rounds": names.count("data"),
            "among dialogues": names.count("dialogues"),
            "among steps": names.count("steps"),
            **differences,
            "seed": seed,
        }
    ]
    limits = [
        Limit("kills", len(had), len(wanted), "min"),
        Limit("differences", sum(differences.values()), 0, "max"),
    ]
    report("rounds_kills", table, limits, arguments=arguments, about=about(__doc__))


@dataclass(frozen=True)
class Place:
    """Where a job is killed: so many seconds after a file of the run has so many lines."""

    name: str
    file: str
    lines: int
    delay: float


def places(chance: random.Random, dialogues: int, *, each: int) -> list[Place]:
    """Places in the order in which a job comes to them."""
    found = [Place("data", "log.jsonl", lines, chance.uniform(0, 0.05)) for lines in (2, 6)]
    for number in range(1, ROUNDS + 1):
        kinds = (
            ("dialogues", f"rounds/{number}/transcripts/.predicted.jsonl", dialogues - 30),
            ("steps", f"rounds/{number}/log.jsonl", 9),
        )
        for name, file, most in kinds:
            lines = sorted(chance.sample(range(2, most), each))
            found += [Place(name, file, line, chance.uniform(0, 0.05)) for line in lines]
    return found


def write_rows(path: Path) -> None:
    """Written dialogues of one turn."""
    chance = random.Random(0)
    with path.open("w", encoding="utf8") as file:
        for _ in range(200):
            word = chance.choice(("red", "green", "blue"))
            messages = [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]
            file.write(json.dumps({"messages": messages}) + "\n")


def settings(dialogues: int) -> dict[str, Any]:
    """The file of both jobs."""
    return {
        "base_model": {
            "type": "scratch",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "context_length": 96,
            "tokenizer": "word",
            "vocab_size": 64,
        },
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 3, "do_sample": True},
        "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [0.9, 0.1, 0.0]}},
        "trainer": {
            "type": "finetune",
            "max_steps": 8,
            "batch_size": 16,
            "learning_rate": 0.003,
            "steps_per_checkpoint": 2,
        },
        "simulation": {
            "world": {"type": "environment", "environment": "worlds_of_tests:Repeat"},
            "tasks": {"count": 20},
            "self_training": {
                "rounds": ROUNDS,
                "tasks": {"count": dialogues},
                "max_steps": 10,
                "select": "all",
                "target": "every_agent_turn",
                "guard": None,
            },
        },
    }


def attempt(run: str, dialogues: int, *, place: Place | None = None) -> bool:
    """One process, which is killed where it comes to a place; whether it was."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            import torch

            from partita.model import Model

            torch.set_num_threads(1)
            Model(settings(dialogues), quiet=True).train(run=run)
            code = 0
        finally:
            os._exit(code)
    status = None
    while status is None:
        done, value = os.waitpid(child, os.WNOHANG)
        if done:
            status = value
        elif place is not None and lines_of(Path(run) / place.file) >= place.lines:
            time.sleep(place.delay)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        time.sleep(0.001)
    killed = os.WIFSIGNALED(status)
    if not killed and os.WEXITSTATUS(status):
        sys.exit("an attempt failed")
    print(run, place, "killed" if killed else "ended", flush=True)
    return killed


def lines_of(path: Path) -> int:
    """Lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def compare(straight: Path, killed: Path) -> dict[str, int]:
    """Files and weights that differ."""
    from safetensors.torch import load_file

    names = [f"rounds/{number}/transcripts/predicted.jsonl" for number in range(1, ROUNDS + 1)]
    logs = ["log.jsonl", *(f"rounds/{number}/log.jsonl" for number in range(1, ROUNDS + 1))]
    models = ["model", *(f"rounds/{number}/model" for number in range(ROUNDS + 1))]
    weights = [[load_file(run / name / "model.safetensors") for run in (straight, killed)] for name in models]
    return {
        "transcripts that differ": sum(
            (straight / name).read_bytes() != (killed / name).read_bytes() for name in names
        ),
        "logs of steps that differ": sum(
            without_times(straight / name) != without_times(killed / name) for name in logs
        ),
        "weights that differ": sum(
            one.keys() != other.keys() or any(not bool((one[name] == other[name]).all()) for name in one)
            for one, other in weights
        ),
    }


def without_times(path: Path) -> list[dict[str, Any]]:
    """A log without the only thing in it that time decides; it has a hash of each step's rows."""
    return [json.loads(line) | {"seconds": None} for line in path.read_text("utf8").splitlines()]


if __name__ == "__main__":
    main()
