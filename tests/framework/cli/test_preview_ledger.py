"""Tests of `partita preview --ledger`."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

import partita

from ...json_lines import write_json_lines
from ..conftest import Command

CONFIG: dict[str, Any] = {
    "base_model": {"type": "scratch", "hidden_size": 32, "num_hidden_layers": 1, "tokenizer": "byte"},
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "team", "type": "category", "decoder": {"labels": ["billing", "delivery"]}}],
    "data": {"source": "rows.jsonl", "max_bad_rows": 1.0},
    "trainer": {"type": "finetune"},
}


def test_brackets_of_a_reason_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"text": f"number {number}", "team": "billing"} for number in range(20)]
    write_json_lines(
        tmp_path / "rows.jsonl", [*rows, {"text": "hello", "team": "[/b]"}, {"text": "x", "team": "[red]y"}]
    )
    Path("config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf8")
    assert command("preview", "config.yaml", "--ledger") == 0
    shown = capsys.readouterr().out
    assert "'[/b]'" in shown
    assert "'[red]y'" in shown


def test_no_console_reads_markup_in_texts_of_users() -> None:
    for path in Path(partita.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console":
                assert "markup" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
