"""Tests that the documented keys of a run's files are those that a run writes."""

import json
import re
from pathlib import Path

import pytest

from partita import Model

from ..json_lines import read_json_lines

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def keys_of_table(page: str, heading: str) -> set[str]:
    """Return the keys in the first column of the table below a heading."""
    text = (GUIDES / page).read_text(encoding="utf8").partition(f"\n{heading}\n")[2]
    rows = re.search(r"^\| --- .*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None, heading
    return {key for row in rows[1].splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a short run."""
    config = {
        "base_model": {"type": "scratch", "size": "nano", "num_hidden_layers": 1, "tokenizer": "byte"},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "label", "type": "category"}],
        "trainer": {"type": "finetune", "max_steps": 2, "batch_size": 8},
    }
    folder = tmp_path_factory.mktemp("documented") / "run"
    rows = [{"text": f"number {number}", "label": "even" if number % 2 == 0 else "odd"} for number in range(64)]
    Model(config, quiet=True).train(rows, run=folder)
    return folder


def test_the_keys_of_the_log_are_documented(run: Path) -> None:
    for line in read_json_lines(run / "log.jsonl"):
        assert set(line) == keys_of_table("training.md", "### Keys of `log.jsonl`")


def test_the_keys_of_the_manifest_are_documented(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf8"))
    assert set(manifest) == keys_of_table("training.md", "### Keys of `manifest.json`")
    for evaluation in manifest["evaluations"]:
        assert {"step", "split", "loss"} <= set(evaluation)
    assert set(manifest["batches"]) == {
        *("rows", "tokens", "loss_tokens", "padding", "seconds"),
        *("padding_share", "tokens_per_second"),
    }
    assert set(manifest["waits"]) == {"seconds", "waited_seconds", "wait_share"}
