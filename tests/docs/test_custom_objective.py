"""Tests of the objective in the guide on custom trainers."""

import csv
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model

from ..json_lines import read_json_lines
from .test_docs import BLOCKS, ROOT

GUIDE = ROOT / "docs" / "guides" / "custom-trainer.md"


def write_files(folder: Path, **trainer: Any) -> Path:
    """Write the files of the guide, with tickets whose answers have one or several tokens."""
    (module,) = (block for block in BLOCKS if block.page == GUIDE and block.comment == "file: row_mean.py")
    (config,) = (block for block in BLOCKS if block.page == GUIDE and "target: row_mean:" in block.text)
    (folder / "row_mean.py").write_text(module.text, encoding="utf8")
    settings = yaml.safe_load(config.text)
    settings["trainer"] |= trainer
    settings["generation"] = {"max_new_tokens": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    draw = random.Random(0)
    with (folder / "tickets.csv").open("w", newline="", encoding="utf8") as file:
        rows = csv.writer(file)
        rows.writerow(["message", "team"])
        for number in range(120):
            rows.writerow([f"ticket {number} {draw.choice(['bill', 'crash'])}", draw.choice(["b", "technical help"])])
    return folder


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "row_mean", raising=False)


@pytest.mark.long
def test_the_objective_of_the_guide_is_trained_evaluated_and_logged(tmp_path: Path) -> None:
    result = Model(write_files(tmp_path) / "run.yaml", quiet=True).train(run=tmp_path / "run")

    log = read_json_lines(tmp_path / "run" / "log.jsonl")
    assert len(log) == result.steps > 6
    assert log[-1]["loss"] < log[0]["loss"]
    assert 0 < log[0]["tokens/probability"] < log[-1]["tokens/probability"] < 1
    held_out = result.metrics["validation"]
    assert held_out["tokens/probability"] == pytest.approx(log[-1]["tokens/probability"], abs=0.3)
    # Cross-entropy gives each token the same weight, so long answers count more.
    cross_entropy = Model.load(tmp_path / "run", quiet=True).evaluate()["model"]
    assert cross_entropy.keys() == {"loss"}
    assert cross_entropy["loss"] != pytest.approx(result.metrics["test"]["loss"], rel=1e-3)


@pytest.mark.long
def test_the_objective_of_the_guide_does_not_depend_on_the_evaluation_batch_size(tmp_path: Path) -> None:
    results = []
    for size in (1, 5):
        folder = tmp_path / str(size)
        folder.mkdir()
        results.append(
            Model(write_files(folder, eval_batch_size=size) / "run.yaml", quiet=True).train(run=folder / "run")
        )
    one, other = (result.metrics["validation"] for result in results)
    assert one == pytest.approx(other, rel=1e-4)
