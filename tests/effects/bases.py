"""Small configurations whose keys are changed."""

from typing import Any

from .observers import Config

PROBE: Config = {
    "base_model": "base",
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "generation": {"max_new_tokens": 3},
    "data": {"source": "rows.jsonl", "batching": {"type": "fixed"}},
    "trainer": {"type": "custom", "target": "programs_of_effects:Probe", "batch_size": 4},
}
"""Trains a few plain steps and records its inputs."""
SEEN: Config = PROBE | {"trainer": PROBE["trainer"] | {"options": {"steps": 8, "learned": 0}}}
"""Records the batches of more than an epoch without training."""
FINETUNE: Config = PROBE | {
    "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [0.7, 0.15, 0.15]}},
    "trainer": {
        "type": "finetune",
        "batch_size": 4,
        "effective_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 0.01,
        "evaluate_generated": False,
        "evaluate_test": False,
    },
}
ANSWER: Config = {
    "base_model": "base",
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "generation": {"max_new_tokens": 8, "logprobs": True},
    "trainer": {"type": "none", "batch_size": 4},
}
"""Predicts a few rows with a model in this process."""


def data(**changes: Any) -> Config:
    """Return sections that change `data`."""
    return {"data": changes}


def trainer(**changes: Any) -> Config:
    """Return sections that change `trainer`."""
    return {"trainer": changes}
