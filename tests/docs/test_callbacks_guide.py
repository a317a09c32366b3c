"""Tests of the example of callbacks in the guide on training."""

from pathlib import Path

import yaml

from partita import Model

from .test_docs import BLOCKS

ROWS = [{"text": f"number {number}", "answer": "yes"} for number in range(16)]


def test_the_callback_of_the_guide_notes_evaluations_and_stops_the_training(tmp_path: Path) -> None:
    module, section = (
        block
        for block in BLOCKS
        if block.page.name == "training.md" and (block.comment == "file: goal.py" or "goal:Goal" in block.text)
    )
    (tmp_path / "goal.py").write_text(module.text, encoding="utf8")
    config = {
        "base_model": {"type": "scratch", "size": "nano", "num_hidden_layers": 1, "tokenizer": "byte"},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"split": {"type": "random", "probabilities": [0.5, 0.5, 0]}},
        "trainer": {
            "type": "finetune",
            "batch_size": 8,
            "effective_batch_size": 8,
            "max_steps": 4,
            "learning_rate": 0.001,
            "evaluate_generated": False,
            "steps_per_evaluation": 1,
        },
    }
    config = yaml.safe_load(section.text.replace("0.05", "100")) | config  # any loss is low enough
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
    result = Model(tmp_path / "run.yaml", quiet=True).train(ROWS, run=tmp_path / "run")
    assert (result.steps, result.stopped_early) == (1, True)
    (line,) = (tmp_path / "run" / "evaluations.txt").read_text().splitlines()
    assert line.startswith("1 ")
