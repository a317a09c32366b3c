"""Small classifiers of transformers, and rows that they can learn: a sentence contains a colour."""

from pathlib import Path
from typing import Any

import numpy as np

from .head_models import tiny_model, write_plain

WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "over", "hills", "under", "grey", "skies")
LABELS = ("blue", "green", "red")
ENCODERS = ("bert", "roberta", "distilbert", "deberta-v2", "modernbert")
DECODERS = ("llama", "gpt2")
RATE: dict[str, Any] = {"learning_rate": 0.01, "learning_rate_scheduler": {"decay": "constant"}}
PROBLEMS = {
    "category": "single_label_classification",
    "set": "multi_label_classification",
    "number": "regression",
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "category": {"name": "label", "type": "category", "decoder": {"labels": list(LABELS)}},
    "set": {"name": "parts", "type": "set", "decoder": {"labels": list(LABELS)}},
    "number": {"name": "length", "type": "number"},
}


def make_rows(count: int, *, seed: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = rng.choice(WORDS, int(rng.integers(1, longest))).tolist()
        label = str(rng.choice(LABELS))
        words.insert(int(rng.integers(0, len(words) + 1)), label)
        parts = [name for name in LABELS if name == label or rng.random() < 0.3]
        rows.append({"text": " ".join(words), "label": label, "parts": ",".join(parts), "length": len(words)})
    return rows


def settings(architecture: str = "bert", kind: str = "category", **changes: Any) -> dict[str, Any]:
    output = OUTPUTS[kind] | ({"head": "linear"} if architecture in DECODERS else {})
    base: dict[str, Any] = {
        "base_model": tiny_model(architecture),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [output],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "finetune", "batch_size": 8, "effective_batch_size": 8, "max_steps": 3, **RATE},
    }
    return base | changes


def write_classifier(folder: Path, architecture: str, kind: str = "category") -> Path:
    """Write a random classifier of transformers whose logits vary, with its tokenizer."""
    from transformers import AutoModelForSequenceClassification

    def describe(described: Any) -> None:
        described.num_labels = 1 if kind == "number" else len(LABELS)
        described.problem_type = PROBLEMS[kind]

    texts = (row["text"] for row in make_rows(50))
    return write_plain(
        folder, tiny_model(architecture), AutoModelForSequenceClassification, texts=texts, describe=describe
    )
