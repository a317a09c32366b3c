"""Tests of every batching type in a short run: sizes are found, recorded, and kept on resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita_schema.errors import ResumeError

from ..json_lines import log_of, write_json_lines
from ..properties import first

OFF = {"evaluate_generated": False, "evaluate_test": False, "skip_all_evaluation": True}


def config(colours: Any, batching: dict[str, Any], *, data: dict[str, Any] | None = None, **trainer: Any) -> Any:
    data = {**colours.config()["data"], "batching": batching, **(data or {})}
    settings = {"learning_rate": 0.002, "batch_size": "auto", "epochs": 1, **OFF, **trainer}
    return colours.config(trainer=settings, data=data)


def size_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "manifest.json").read_text())["batch_sizes"]["training"]
    return record


@pytest.mark.parametrize("kind", first(["pack", "token_budget"]))
def test_token_batches_train_every_row_once_with_about_the_configured_rows_per_step(
    colours: Any, tmp_path: Path, kind: str
) -> None:
    Model(config(colours, {"type": kind, "window": 128}, effective_batch_size=64), quiet=True).train(run=tmp_path)

    log, size = log_of(tmp_path), size_of(tmp_path)
    assert sum(line["rows"] for line in log) == 512
    assert 512 / len(log) == pytest.approx(64, rel=0.34), (
        "batches are not split, so the difference is at most half a batch"
    )
    assert size["origin"] in ("tuned", "cached")
    if kind == "token_budget":
        assert size["max_tokens"] == size["rows"] * size["prompt_tokens"]
        assert max(line["padding"] for line in log) < 0.25
    else:
        assert size["max_tokens"] == size["prompt_tokens"]


def test_the_size_for_training_is_measured_again_if_longer_rows_were_added(
    colours: Any, tmp_path: Path, train_killed: Any
) -> None:
    rows = colours.rows(40)
    split = {"type": "fixed", "column": "place"}
    written = config(colours, {"type": "bucket"}, skip_all_evaluation=False, steps_per_checkpoint=2, epochs=4)
    written["data"] |= {"source": str(tmp_path / "rows.jsonl"), "split": split, "resume": "fresh"}

    def write(*more: dict[str, Any]) -> None:
        places = ["train", "train", "train", "validation"] * 10
        placed = [row | {"place": place} for row, place in zip(rows, places, strict=True)]
        write_json_lines(tmp_path / "rows.jsonl", [*placed, *(row | {"place": "train"} for row in more)])

    write()
    train_killed(Model(written, quiet=True), tmp_path / "run", after=3)
    before = size_of(tmp_path / "run")
    assert "evaluation" in json.loads((tmp_path / "run" / "manifest.json").read_text())["batch_sizes"]
    write({**rows[0], "text": "I see 4 balls and they are green " * 2})
    result = Model(written, quiet=True).train(run=tmp_path / "run")

    assert result.resumed_from == 2
    assert size_of(tmp_path / "run")["prompt_tokens"] > before["prompt_tokens"]


@pytest.mark.long
def test_a_run_uses_the_configured_token_budget(colours: Any, tmp_path: Path) -> None:
    batching = {"type": "token_budget", "max_tokens": 300}
    Model(config(colours, batching, gradient_accumulation_steps=1), quiet=True).train(run=tmp_path)

    size = size_of(tmp_path)
    assert (size["origin"], size["max_tokens"]) == ("max_tokens", 300)
    for line in log_of(tmp_path):
        assert line["tokens"] / (1 - line["padding"]) <= 300.5


@pytest.mark.parametrize("kind", ["token_budget", "pack"])
@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(colours: Any, tmp_path: Path, train_killed: Any, kind: str) -> None:
    written = config(colours, {"type": kind, "window": 128}, effective_batch_size=64, steps_per_checkpoint=2)
    Model(written, quiet=True).train(run=tmp_path / "straight")
    run = tmp_path / "parts"
    train_killed(Model(written, quiet=True), run, after=5)
    tokens = size_of(run)["max_tokens"]

    Model(written, quiet=True).train(run=run)

    assert size_of(run)["max_tokens"] == tokens
    straight, parts = log_of(tmp_path / "straight"), log_of(run)
    assert [line["batch_hash"] for line in parts] == [line["batch_hash"] for line in straight]
    assert [line["loss"] for line in parts] == [line["loss"] for line in straight]


def test_auto_reports_its_choice_and_the_reason(colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="partita"):
        Model(config(colours, {"type": "auto"}, batch_size=16, max_steps=1), quiet=True).train(run=tmp_path)

    lines = [message for message in caplog.messages if message.startswith("batching bucket: rows have ")]
    assert len(lines) == 1
    assert "in random order would have" in lines[0]


@pytest.mark.long
def test_changed_data_stop_a_run_or_restart_its_epoch(
    colours: Any, tmp_path: Path, train_killed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, run = tmp_path / "rows.jsonl", tmp_path / "run"
    lines = (colours.path / "rows.jsonl").read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:320]))
    data = {"source": str(source)}
    written = config(colours, {"type": "bucket"}, data=data, batch_size=16, epochs=3, steps_per_checkpoint=5)
    train_killed(Model(written, quiet=True), run, after=22)
    source.write_text("".join(lines[:352]))

    with pytest.raises(ResumeError) as error:
        Model(written, quiet=True).train(run=run)
    assert " files: " in str(error.value)
    assert "write data.resume: restart_epoch to begin epoch 1 again, or data.resume: fresh" in str(error.value)

    written["data"]["resume"] = "restart_epoch"
    result = Model(written, quiet=True).train(run=run)
    assert "As data.resume: restart_epoch says, the run continues at the beginning of epoch 1" in caplog.text
    assert result.resumed_from == 20
    epochs = [line["epoch"] for line in log_of(run)]
    assert epochs[19] == pytest.approx(1.25)
    assert epochs[20] == pytest.approx(1 + 16 / 281, abs=0.01)
