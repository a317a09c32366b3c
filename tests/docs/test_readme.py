"""Tests that the examples of the README run in an empty folder, with a small local model instead of a Hub model."""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partita import Model
from partita.cli.main import app
from partita_schema.load import load_config

from .test_docs import BLOCKS, ROOT

SPEAKERS = 'data={dialogue: {speakers: {user: "User: ", assistant: "Model: "}}}'


def run(command: str, *overrides: str) -> None:
    words = [*command.removeprefix("partita ").split(), *(word for one in overrides for word in ("--set", one))]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, f"{command}\n{ended.output}\n{ended.exception!r}"


@pytest.mark.long
def test_the_examples_of_the_readme_run_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    blocks: dict[str, list[str]] = defaultdict(list)
    for block in BLOCKS:
        if block.page == ROOT / "README.md":
            blocks[block.language].append(block.text)
    (rows,), (reviews, guess), (finetune, environment) = blocks["csv"], blocks["yaml"], blocks["python"]
    for name, text in {
        "reviews.csv": rows,
        "reviews.yaml": reviews,
        "guess.yaml": guess,
        "guess.py": environment,
    }.items():
        Path(name).write_text(text, encoding="utf8")
    _, predict, simulate = ([line[2:] for line in text.splitlines() if line[:2] == "$ "] for text in blocks["console"])

    scratch = load_config(reviews).config.model_dump(exclude_unset=True)
    scratch |= {"base_model": {"type": "scratch", "size": "nano"}, "data": {"source": "reviews.csv"}}
    Model(scratch, quiet=True).save("local_model")

    run(*predict, "base_model=local_model")
    with Path("labels.csv").open(encoding="utf8") as file:
        assert [row["review"] for row in csv.DictReader(file)] == [
            row["review"] for row in csv.DictReader(rows.splitlines())
        ]

    hub_id = load_config(reviews).config.base_model
    trained = reviews.replace(hub_id, "local_model").replace("{type: none}", "{type: finetune}")
    Path("reviews.yaml").write_text(f"{trained}adapter: {{type: lora}}\n", encoding="utf8")
    exec(compile(finetune, "README.md", "exec"), {})
    assert Path("runs/reviews/model/adapter_model.safetensors").exists()

    run(*simulate, "base_model=local_model", SPEAKERS)
    assert len(Path("runs/guess/transcripts/predicted.jsonl").read_text("utf8").splitlines()) == 10
