"""Tests that steps, answers and scores of a model with a head do not depend on the number of processes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ..json_lines import read_json_lines

pytestmark = pytest.mark.long

NOISE = 1e-4
"""Largest weight that rounding errors alone can reach in these steps; 3e-5 was measured."""
TOLERANCE = 1e-4
"""Difference of weights by the largest weight of the tensor. The ranks add up gradients in another order, in float32;
2e-5 was measured after these steps."""
STEPS = ("train:6", "predict:more", "evaluate:more")


def test_two_processes_give_the_result_of_one(processes: Any, tmp_path: Path) -> None:
    settings = processes.settings()
    settings["base_model"] |= {"architecture": "distilbert"}
    del settings["adapter"], settings["generation"]
    results = {}
    for ranks in (1, 2):
        folder = processes.prepare(tmp_path / f"job-{ranks}", settings)
        results[ranks] = folder, processes.start(ranks, folder, *STEPS)
    (one, alone), (two, together) = results[1], results[2]

    logs = [processes.log(folder) for folder in (one, two)]
    assert [line["batch_hash"] for line in logs[0]] == [line["batch_hash"] for line in logs[1]]
    for key, tolerance in (("loss", 1e-6), ("gradient_norm", 5e-6)):
        assert [line[key] for line in logs[0]] == pytest.approx([line[key] for line in logs[1]], rel=tolerance), key
    weights = [load_file(folder / "run" / "model" / "model.safetensors") for folder in (one, two)]
    for name, tensor in weights[0].items():
        error, largest = (tensor - weights[1][name]).abs().max(), tensor.abs().max()
        if name.endswith("k_lin.bias"):
            # The gradient of these biases is zero, because softmax ignores a constant added to all keys. AdamW divides
            # the rounding errors that are computed instead by their own size, so the weights are noise.
            assert max(error, largest) < NOISE, name
        else:
            assert error < TOLERANCE * largest, name
    answers = [read_json_lines(folder / "more.out.jsonl") for folder in (one, two)]
    assert len(answers[0]) == 37
    for first, second in zip(*answers, strict=True):
        assert first.pop("colour_probabilities") == pytest.approx(second.pop("colour_probabilities"), abs=1e-6)
        assert first.pop("colour_probability") == pytest.approx(second.pop("colour_probability"), abs=1e-6)
        assert first == second
    for name in ("validation", "test", "more"):
        rows = [read_json_lines(folder / "run" / "evaluations" / f"{name}.jsonl") for folder in (one, two)]
        assert [row["key"] for row in rows[0][1:]] == [row["key"] for row in rows[1][1:]]
        assert [row["loss"] for row in rows[0][1:]] == pytest.approx([row["loss"] for row in rows[1][1:]], rel=1e-4)
        assert rows[0][0]["fingerprint"] == rows[1][0]["fingerprint"]
        assert rows[0][0]["rows"] == len(rows[0]) - 1 == len(rows[1]) - 1
    assert together["predict:more"] == alone["predict:more"]
    assert together["evaluate:more"]["model"] == pytest.approx(alone["evaluate:more"]["model"], rel=1e-6)
    assert together["evaluate:more"]["colour"]["accuracy"] == alone["evaluate:more"]["colour"]["accuracy"]
