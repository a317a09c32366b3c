"""Tests the guide for ParlAI users: writes its files and runs its commands and programs."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partita.cli.main import app

from .test_docs import BLOCKS, ROOT

PAGE = ROOT / "docs" / "guides" / "from-parlai.md"


def rewards(file: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in file.read_text("utf8").splitlines()]


@pytest.mark.long
def test_all_blocks_of_the_guide_from_parlai_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("rooms", "guest"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    commands = []
    for block in BLOCKS:
        if block.page != PAGE:
            continue
        if block.comment.startswith("file: "):
            (tmp_path / block.comment.removeprefix("file: ")).write_text(block.text, encoding="utf8")
        elif block.comment == "run":
            exec(compile(block.text, str(block), "exec"), {})
        for line in block.text.splitlines() if block.language == "console" else ():
            commands.append(line.removeprefix("$ partita ").split())
            ended = CliRunner().invoke(app, commands[-1])
            assert ended.exit_code == 0, f"{block}: {line}\n{ended.output}\n{ended.exception!r}"

    assert [command[0] for command in commands] == ["preview", "train", "evaluate", "simulate", "simulate", "simulate"]
    (transcripts,) = tmp_path.glob("runs/desk*/transcripts/predicted.jsonl")
    assert rewards(transcripts) == rewards(tmp_path / "again" / "predicted.jsonl"), "another batch size"
    assert sum(rewards(transcripts)) >= 20, "of 40; guessing would give 13"
    assert {path.name for path in (tmp_path / "replayed").glob("[a-z]*.jsonl")} == {"gold.jsonl", "predicted.jsonl"}
    oks = [json.loads(line)["ok"] for line in (tmp_path / "polite" / "predicted.jsonl").read_text("utf8").splitlines()]
    assert oks == [True] * 20
