"""Tests that reward models do not depend on the number of processes, and can share their weights."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ..json_lines import read_json_lines, write_json_lines

pytestmark = pytest.mark.long

TOLERANCE = 1e-4
"""Difference of weights by the largest weight of the tensor: the ranks add up gradients in another order."""
SHARDED = {"type": "torchrun", "sharding": "full", "timeout_seconds": 60}
STEPS = ("train:6", "predict:more", "evaluate:more")


def prepare(processes: Any, folder: Path, **changes: Any) -> Path:
    """Write pairs of answers and a configuration of a reward model."""
    settings = processes.settings() | changes
    settings["output_features"] = [{"name": "answer", "type": "preference"}]
    settings["trainer"] |= {"type": "reward", "center": 0.05}
    del settings["adapter"], settings["generation"]
    processes.prepare(folder, settings)
    for name in ("rows.jsonl", "more.jsonl"):
        rows = [
            {"text": row["text"], "chosen": f"a {row['colour']}", "rejected": "a ball I see"[: 3 + number % 10]}
            for number, row in enumerate(read_json_lines(folder / name))
        ]
        write_json_lines(folder / name, rows)
    return folder


def assert_same(processes: Any, one: Path, other: Path) -> None:
    """Assert that two runs took the same steps to the same weights."""
    logs = [processes.log(folder) for folder in (one, other)]
    assert len(logs[0]) == 6
    for key in ("loss", "rewards/margins", "rewards/chosen"):
        assert [line[key] for line in logs[0]] == pytest.approx([line[key] for line in logs[1]], rel=1e-4, abs=1e-6), (
            key
        )
    weights = [load_file(folder / "run" / "model" / "model.safetensors") for folder in (one, other)]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < TOLERANCE * tensor.abs().max(), name


@pytest.mark.parametrize(("ranks", "changes"), [(2, {}), (4, {}), (2, {"backend": SHARDED})], ids=["2", "4", "sharded"])
def test_several_processes_give_the_result_of_one(
    processes: Any, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    one, other = prepare(processes, tmp_path / "one"), prepare(processes, tmp_path / "other", **changes)
    steps = STEPS[:1] if changes else STEPS  # a saved model is loaded whole
    results = [processes.start(1, one, *steps), processes.start(ranks, other, *steps)]

    assert_same(processes, one, other)
    metrics = [result["train:6"]["metrics"] for result in results]
    for split in ("validation", "test"):
        assert metrics[0][split] == pytest.approx(metrics[1][split], rel=1e-4, abs=1e-6)
    if not changes:
        answers = [read_json_lines(folder / "more.out.jsonl") for folder in (one, other)]
        for first, second in zip(*answers, strict=True):
            for name in ("answer_score", "answer_rejected_score"):
                assert first.pop(name) == pytest.approx(second.pop(name), rel=1e-4, abs=1e-5)
            assert first == second
        model = [result["evaluate:more"]["model"] for result in results]
        assert model[0] == pytest.approx(model[1], rel=1e-4, abs=1e-6)


def test_a_killed_run_of_four_processes_continues_on_one(processes: Any, tmp_path: Path) -> None:
    one, other = prepare(processes, tmp_path / "one"), prepare(processes, tmp_path / "other")
    processes.start(1, one, "train:6")
    processes.kill(4, other, "train:6", rank=1, pattern="run/log.jsonl", lines=4, delay=0.0)
    result = processes.start(1, other, "train:6")

    assert result["train:6"]["resumed_from"] == 3
    assert_same(processes, one, other)
