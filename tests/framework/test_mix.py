"""Tests of several data sources in a short run: shares, counts and losses by source, and resuming."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita import Model

from ..json_lines import log_of, write_json_lines

TRAINER = {"learning_rate": 0.002, "batch_size": 8, "evaluate_generated": False, "evaluate_test": False}


def config(colours: Any, folder: Path, *, stop: str = "all_once", **trainer: Any) -> Any:
    rows = colours.rows(160)
    for name, part in (("many", rows[:120]), ("few", rows[120:])):
        write_json_lines(folder / f"{name}.jsonl", part)
    mix = [{"source": str(folder / f"{name}.jsonl"), "weight": weight} for name, weight in (("many", 2), ("few", 1))]
    result = colours.config(trainer={**TRAINER, "epochs": 1, **trainer})
    result["data"] = {"mix": mix, "stop": stop, "split": {"type": "random", "probabilities": [0.8, 0.1, 0.1]}}
    return result


def manifest_of(run: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return manifest


def test_a_mix_is_trained_with_its_counts_and_losses(colours: Any, tmp_path: Path) -> None:
    result = Model(config(colours, tmp_path), quiet=True).train(run=tmp_path / "run")

    log, used = log_of(tmp_path / "run"), manifest_of(tmp_path / "run")["sources"]
    assert {name: counts["rows"] for name, counts in used.items()} == {"many": 96, "few": 32}
    assert sum(line["rows/few"] for line in log) == 32
    assert sum(line["tokens"] for line in log) == sum(counts["tokens"] for counts in used.values())
    losses = result.metrics["validation"]
    assert (
        min(losses["loss/many"], losses["loss/few"]) <= losses["loss"] <= max(losses["loss/many"], losses["loss/few"])
    )
    assert losses["loss/many"] != losses["loss/few"]


@pytest.mark.long
def test_a_resumed_mix_equals_an_uninterrupted_one(colours: Any, tmp_path: Path, train_killed: Any) -> None:
    written = config(colours, tmp_path, stop="all", steps_per_checkpoint=3)
    Model(written, quiet=True).train(run=tmp_path / "straight")
    train_killed(Model(written, quiet=True), tmp_path / "killed", after=5)
    Model(written, quiet=True).train(run=tmp_path / "killed")

    assert log_of(tmp_path / "killed") == log_of(tmp_path / "straight")
    assert manifest_of(tmp_path / "killed")["sources"] == manifest_of(tmp_path / "straight")["sources"]
    counts = manifest_of(tmp_path / "straight")["sources"]
    assert counts["many"]["rows"] == 96
    assert abs(counts["few"]["rows"] - 48) <= 1


def test_rows_passed_as_an_argument_replace_the_mix(colours: Any, tmp_path: Path) -> None:
    for name in ("many", "few"):
        (tmp_path / "given" / name).mkdir(parents=True)
        rows = "".join(json.dumps(row) + "\n" for row in colours.rows(20))
        (tmp_path / "given" / name / "x.jsonl").write_text(rows)

    Model(config(colours, tmp_path, stop="all"), quiet=True).train(
        str(tmp_path / "given" / "*" / "*.jsonl"), run=tmp_path / "run"
    )

    assert sum(line["rows"] for line in log_of(tmp_path / "run")) == 32
