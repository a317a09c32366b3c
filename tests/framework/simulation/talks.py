"""Dialogues of two small models, for tests."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from partita import Model

from ...json_lines import read_json_lines, write_json_lines

PROGRAMS = [Path(__file__).with_name(f"{name}_of_tests.py") for name in ("agents", "plays")]
WORDS = ["say", "once", "more", "what", "red", "green", "blue", "one", "two", "three", "ball", "box", *"0123456"]
USER: dict[str, Any] = {"type": "model", "run": "guest", "prompt": "say {number}"}


def fill(folder: Path) -> None:
    """Write two models of different sizes and tokenizers, dialogues, and scripted agents into a folder."""
    for program in PROGRAMS:
        shutil.copy(program, folder)
    rng = random.Random(0)
    rows = []
    for number in range(20):
        messages = random_messages(rng, 4 + 2 * (number % 2))
        rows.append({"messages": messages, "goal": messages[0]["content"]})
    write_json_lines(folder / "rows.jsonl", rows)
    for name, size, seed in (("base", 32, 42), ("guest", 16, 7)):
        save_model(
            settings(folder), folder, name=name, hidden_size=size, vocab_size=64 if name == "base" else 48, seed=seed
        )


def random_messages(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Messages of three words, of a user and an assistant in turn."""
    texts = [" ".join(rng.choices(WORDS, k=3)) for _ in range(count)]
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def save_model(
    file: dict[str, Any],
    folder: Path,
    *,
    name: str = "base",
    hidden_size: int = 32,
    vocab_size: int = 64,
    seed: int = 42,
) -> None:
    """Save a new model of the words in rows.jsonl."""
    scratch = {
        "type": "scratch",
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "context_length": 96,
        "tokenizer": "word",
        "vocab_size": vocab_size,
    }
    made = file | {"base_model": scratch, "seed": seed, "data": {"source": str(folder / "rows.jsonl")}}
    del made["simulation"]
    Model(made, quiet=True).save(folder / name)


def settings(folder: Path, **simulation: Any) -> dict[str, Any]:
    """Return a configuration; `simulation` overrides keys of its simulation section."""
    user_sim = {
        "world": {"type": "user_sim", "done": "box"},
        "agents": {"user": USER},
        "tasks": {"count": 40},
        "max_turns": 4,
    }
    return file_of(folder, **user_sim | simulation)


def file_of(folder: Path, **simulation: Any) -> dict[str, Any]:
    """A file with this simulation of the model `base`."""
    return {
        "base_model": str(folder / "base"),
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 5, "do_sample": True, "temperature": 1.0},
        "trainer": {"type": "none", "batch_size": 8},
        "simulation": simulation,
    }


def simulated(folder: Path, output: Path, *, batch_size: int | None = None, **simulation: Any) -> Any:
    """Run a simulation that writes transcripts into `output`; return its report."""
    (folder / "run.yaml").write_text(json.dumps(settings(folder, **simulation)), encoding="utf8")
    return Model(folder / "run.yaml", quiet=True).simulate(output, batch_size=batch_size)


def transcripts(output: Path) -> list[dict[str, Any]]:
    return read_json_lines(output / "predicted.jsonl")
