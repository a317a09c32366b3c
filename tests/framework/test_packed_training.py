"""Tests of training on packed rows, from configuration to log."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita import Model

from ..json_lines import read_json_lines


def log_of(config: dict[str, Any], run: Path) -> list[dict[str, Any]]:
    Model(config, quiet=True).train(run=run)
    return read_json_lines(run / "log.jsonl")


def config_of(colours: Any, batching: dict[str, Any], *, batch_size: int, **sections: Any) -> dict[str, Any]:
    trainer = {"epochs": 3, "batch_size": batch_size, "gradient_accumulation_steps": 1, "skip_all_evaluation": True}
    data = {**colours.config()["data"], "batching": batching}
    return colours.config(data=data, trainer={**trainer, "steps_per_checkpoint": 100}, **sections)


@pytest.mark.parametrize("adapter", [None, {"type": "lora", "r": 4}], ids=["full", "lora"])
@pytest.mark.long
def test_packed_rows_give_the_losses_of_single_rows_with_less_padding(
    colours: Any, tmp_path: Path, adapter: dict[str, Any] | None
) -> None:
    """Each step has all rows, so steps do not depend on the batching."""
    sections = {"adapter": adapter} if adapter else {}
    alone = log_of(config_of(colours, {"type": "fixed"}, batch_size=1000, **sections), tmp_path / "alone")
    pack = {"type": "pack", "max_tokens": 96}
    packed = log_of(config_of(colours, pack, batch_size=1000, **sections), tmp_path / "packed")
    assert len(packed) == len(alone) == 3
    for one, other in zip(packed, alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)
        assert all(one[key] == other[key] for key in ("rows", "tokens", "loss_tokens"))
        assert one["padding"] < 0.1 < other["padding"]


def test_batch_size_auto_measures_lines_of_packed_rows(colours: Any, tmp_path: Path) -> None:
    config = config_of(colours, {"type": "pack"}, batch_size=4)
    config["trainer"] |= {"batch_size": "auto", "epochs": 1, "gradient_accumulation_steps": None}
    del config["trainer"]["gradient_accumulation_steps"]
    log = log_of(config, tmp_path / "run")
    training = json.loads((tmp_path / "run" / "manifest.json").read_text())["batch_sizes"]["training"]
    assert training["rows"] >= 1
    assert sum(line["rows"] for line in log) == 512
    assert sum(line["padding"] for line in log) / len(log) < 0.3
