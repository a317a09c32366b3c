"""The files of a small self-training job: a user says a word, and the model learns to repeat it."""

import random
import shutil
from pathlib import Path
from typing import Any

from .json_lines import write_json_lines

WORLDS = Path(__file__).parent / "framework" / "simulation" / "worlds_of_tests.py"


def fill(folder: Path) -> None:
    """Write the world and 60 dialogues of one turn."""
    shutil.copy(WORLDS, folder)
    rng = random.Random(0)
    words = [rng.choice(("red", "green", "blue")) for _ in range(60)]
    turns = [[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}] for word in words]
    write_json_lines(folder / "rows.jsonl", [{"messages": messages} for messages in turns])


def settings(*, base_model: Any, generation: Any, trainer: Any, **self_training: Any) -> dict[str, Any]:
    """Return a configuration with two rounds of 6 steps each."""
    return {
        "base_model": base_model,
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 3, **generation},
        "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [0.9, 0.1, 0.0]}},
        "trainer": {"type": "finetune", **trainer},
        "simulation": {
            "world": {"type": "environment", "environment": "worlds_of_tests:Repeat"},
            "tasks": {"count": 20},
            "self_training": {"rounds": 2, "max_steps": 6, **self_training},
        },
    }
