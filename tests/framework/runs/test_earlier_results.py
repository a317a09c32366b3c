"""Tests of a finished run that is trained further: results of its earlier weights are removed."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.runs.earlier_results import step_of_weights

CONFIG = {
    "base_model": {"type": "scratch", "size": "nano", "tokenizer": "char"},
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "label", "type": "category", "head": "linear"}],
    "data": {"split": {"type": "random", "probabilities": [0.6, 0.2, 0.2]}},
    "trainer": {"type": "finetune", "batch_size": 8, "epochs": 1},
}
ROWS = [{"text": f"{letter} {number}", "label": letter} for letter in "ab" for number in range(20)]


def train(run: Path, **trainer: Any) -> dict[str, Any]:
    """Train, and return the manifest."""
    Model({**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}}, quiet=True).train(ROWS, run=run)
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_bytes())
    return manifest


def recorded(run: Path) -> list[str]:
    return sorted(path.stem for path in (run / "evaluations").iterdir())


def test_results_of_earlier_weights_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    before = train(run)
    Model.load(run, quiet=True).evaluate(ROWS)
    assert recorded(run) == ["dataset", "test", "validation"]
    with caplog.at_level(logging.INFO):
        after = train(run, epochs=2, evaluate_test=False)
    assert after["steps"] == 2 * before["steps"]
    assert (sorted(before["metrics"]), sorted(after["metrics"])) == (["test", "validation"], ["validation"])
    assert recorded(run) == ["validation"]
    assert (
        f"results of the earlier weights are removed: dataset, test; partita evaluate {run} gives those of the new ones"
    ) in caplog.messages
    assert sorted(train(run, epochs=3)["metrics"]) == ["test", "validation"]


def test_results_are_kept_if_the_weights_stay_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = train(run)
    Model.load(run, quiet=True).evaluate(ROWS)
    after = train(run, keep_checkpoints=2, evaluate_test=False)
    assert after["steps"] == before["steps"]
    assert after["metrics"] == before["metrics"]
    assert recorded(run) == ["dataset", "test", "validation"]


@pytest.mark.parametrize(("restores", "expected"), [(True, 3), (False, 9)])
def test_the_step_of_the_weights_is_the_best_one_if_it_was_restored(restores: bool, expected: int) -> None:
    manifest = {"steps": 9, "best_step": 3, "config": {"trainer": {"restore_best": restores}}}
    assert step_of_weights(manifest) == expected
    assert step_of_weights({"steps": 9, "config": {"trainer": {}}}) == 9
    assert step_of_weights({}) is None
