"""Tests that training on preferences does not depend on the number of processes, and can share its weights."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from ..json_lines import read_json_lines, write_json_lines

pytestmark = pytest.mark.long

TOLERANCE = 1e-3
"""Difference of weights by the largest weight of the tensor: the ranks add up gradients in another order."""
SHARDED = {"type": "torchrun", "sharding": "full", "timeout_seconds": 60}
DPO = {"type": "preference", "loss": {"type": "dpo", "rpo_alpha": 0.1}}
IN_STEP = DPO | {"references": "in_step"}
KTO = {"type": "kto", "undesirable_weight": "auto"}


def prepare(processes: Any, folder: Path, trainer: dict[str, Any], **changes: Any) -> Path:
    """Write pairs of answers, or labelled answers, and a configuration."""
    settings = processes.settings() | changes
    kto = trainer["type"] == "kto"
    settings["output_features"] = [
        {"name": "answer", "type": "text", "label": "good"} if kto else {"name": "answer", "type": "preference"}
    ]
    settings["trainer"] |= trainer
    if "backend" in changes:
        del settings["adapter"]
        settings["trainer"]["learning_rate"] = 0.003
    processes.prepare(folder, settings)
    for name in ("rows.jsonl", "more.jsonl"):
        rows = list[dict[str, Any]]()
        for number, row in enumerate(read_json_lines(folder / name)):
            good, bad = f"a {row['colour']}", "a ball I see"[: 3 + number % 10]
            if kto:
                rows.append({"text": row["text"], "answer": bad if number % 3 else good, "good": number % 3 == 0})
            else:
                rows.append({"text": row["text"], "chosen": good, "rejected": bad})
        write_json_lines(folder / name, rows)
    return folder


def assert_same(processes: Any, one: Path, other: Path) -> None:
    """Assert that two runs took the same steps to the same weights."""
    logs = [processes.log(folder) for folder in (one, other)]
    assert len(logs[0]) == 6
    assert [line["batch_hash"] for line in logs[0]] == [line["batch_hash"] for line in logs[1]]
    has_kl = "kl" in logs[0][0]
    assert not has_kl or max(line["kl"] for line in logs[0]) > 0.01
    for key in ("loss", "rewards/margins", "logps/chosen", *(["kl"] if has_kl else [])):
        values = [[line[key] for line in log] for log in logs]
        assert values[0] == pytest.approx(values[1], rel=2e-4, abs=1e-5), key
    files = [sorted((folder / "run" / "model").glob("*.safetensors"))[0] for folder in (one, other)]
    weights = [load_file(file) for file in files]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < TOLERANCE * tensor.abs().max() + 1e-5, name


@pytest.mark.parametrize(
    ("trainer", "ranks", "changes"),
    [
        (DPO, 2, {}),
        (IN_STEP, 4, {}),
        (KTO, 2, {}),
        (DPO, 2, {"backend": SHARDED}),
        (IN_STEP, 2, {"backend": SHARDED}),
        (KTO, 2, {"backend": SHARDED}),
    ],
    ids=["dpo", "dpo in steps", "kto", "sharded", "sharded dpo in steps", "sharded kto"],
)
def test_several_processes_give_the_result_of_one(
    processes: Any, tmp_path: Path, trainer: dict[str, Any], ranks: int, changes: dict[str, Any]
) -> None:
    one, other = (prepare(processes, tmp_path / name, trainer, **changes) for name in ("one", "other"))
    steps = ("train:6", "evaluate:more")
    results = [processes.start(number, folder, *steps) for number, folder in ((1, one), (ranks, other))]

    assert_same(processes, one, other)
    for split in ("validation", "test"):
        metrics = [result["train:6"]["metrics"][split] for result in results]
        assert metrics[0].keys() == metrics[1].keys()
        for name in {"loss", "rewards/chosen", "rewards/margins", "kl"} & metrics[0].keys():
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-3, abs=1e-5), (split, name)
            for result, trained in zip(results, metrics, strict=True):
                assert result["evaluate:more"]["model"][name] == pytest.approx(trained[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("trainer", [DPO, IN_STEP, KTO], ids=["dpo", "dpo in steps", "kto"])
def test_a_killed_run_of_four_processes_continues_on_one(
    processes: Any, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    one, other = (prepare(processes, tmp_path / name, trainer) for name in ("one", "other"))
    processes.start(1, one, "train:6")
    processes.kill(4, other, "train:6", rank=1, pattern="run/log.jsonl", lines=4, delay=0.0)
    result = processes.start(1, other, "train:6")

    assert result["train:6"]["resumed_from"] == 3
    assert_same(processes, one, other)


def test_a_run_of_four_processes_gets_more_steps_on_one(processes: Any, tmp_path: Path) -> None:
    one, other = (prepare(processes, tmp_path / name, DPO) for name in ("one", "other"))
    processes.start(1, one, "train:6")
    processes.start(4, other, "train:2")
    processes.start(1, other, "train:6")

    assert_same(processes, one, other)


def test_a_rank_that_cannot_prepare_a_step_ends_the_job_with_its_error(processes: Any, tmp_path: Path) -> None:
    folder = prepare(processes, tmp_path / "job", KTO | {"references": "before"})
    processes.start(1, folder, "train:7")
    assert (folder / "run" / "references.jsonl").read_text("utf8").startswith('{"steps": "all"')
    rows = read_json_lines(folder / "rows.jsonl")
    write_json_lines(folder / "rows.jsonl", [rows[0] | {"answer": "red red red"}, *rows[1:]])
    settings = yaml.safe_load((folder / "run.yaml").read_text("utf8"))
    settings["data"]["resume"] = "fresh"
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), "utf8")

    job = processes.launch(2, folder, "train:21")
    errors = [rank.communicate()[1] for rank in job]

    assert [rank.returncode for rank in job] == [1, 1]
    reason = "1 of 8 rows, such as rows.jsonl:1, cannot be compared with the model before training"
    assert any(f"TrainingError: {reason}" in error for error in errors), errors
    assert any("OtherRankError: rank" in error and reason in error for error in errors), errors
