"""Tests of training on preferences with Ludwig's files and with quantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model

from ..json_lines import write_json_lines

SCRATCH = {"type": "scratch", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 64}
PAIRS = [{"prompt": f"q{n}", "chosen": f"yes {n}", "rejected": "no", "label": n % 2} for n in range(8)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "base_model": SCRATCH | {"tokenizer": "byte", "vocab_size": 300},
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "chosen", "type": "text"}],
        "data": {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}},
        "trainer": {"type": "finetune", "batch_size": 4, "max_steps": 1},
    }
    Model(config, quiet=True).train(PAIRS, run=folder / "run")
    return folder / "run" / "model"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "orpo", "kto"])
def test_files_of_ludwig_train(base: Path, kind: str, tmp_path: Path) -> None:
    outputs = ["chosen", "label"] if kind == "kto" else ["chosen", "rejected"]
    config = {
        "model_type": "llm",
        "base_model": str(base),
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": name, "type": "text"} for name in outputs],
        "adapter": {"type": "lora", "r": 4},
        "preprocessing": {"split": {"type": "random", "probabilities": [0.5, 0.5, 0.0]}},
        "trainer": {"type": kind, "beta": 0.2, "batch_size": 2, "epochs": 3, "learning_rate": 0.01},
    }
    if kind == "kto":
        config["output_features"][1]["type"] = "category"  # type: ignore[index]
    (tmp_path / "ludwig.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
    rows = [row | {"label": bool(row["label"])} for row in PAIRS]
    write_json_lines(tmp_path / "rows.jsonl", rows)

    result = Model(tmp_path / "ludwig.yaml", quiet=True).train(tmp_path / "rows.jsonl", run=tmp_path / "run")

    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf8").splitlines()]
    assert len(steps) == result.steps == 3
    assert {"rewards/margins", "logps/chosen"} <= steps[-1].keys()
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert "rewards/margins" in result.metrics["validation"]


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_the_range_test_reads_rows_beyond_a_short_training(base: Path, kind: str, tmp_path: Path) -> None:
    pair = {"name": "answer", "type": "preference"}
    output = {"name": "chosen", "type": "text", "label": "label"} if kind == "kto" else pair
    config = {
        "base_model": str(base),
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [output],
        "data": {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}},
        "trainer": {"type": kind, "max_steps": 1, "batch_size": 2, "learning_rate": "auto"},
    }
    assert Model(config, quiet=True).train(PAIRS, run=tmp_path / "run").steps == 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("references", ["before", "in_step"])
def test_quantized_weights_train_on_pairs(base: Path, bits: int, references: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config: dict[str, Any] = {
        "base_model": str(base),
        "quantization": {"bits": bits},
        "adapter": {"type": "lora", "r": 4, "dropout": 0.0},
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}},
        "trainer": {"type": "preference", "batch_size": 8, "max_steps": 3, "learning_rate": 0.01},
    }
    config["trainer"]["references"] = references
    Model(config, quiet=True).train(PAIRS, run=tmp_path / "run")

    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text("utf8").splitlines()]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3), "the model is its own reference"
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["rewards/margins"] > 0
