"""Tests of the context of a run: the configuration, the run and the data."""

import json
from pathlib import Path

import pytest

from partita import DataError, Model, ResumeError
from partita.backends.context import RunContext
from partita_schema.load import load_config

FILE = """# A comment that run directories keep.
base_model: base
input_features: [{name: text}]
output_features: [{name: answer, type: text}]
data: {source: "${ROWS}"}
"""


def test_a_copy_for_another_process_keeps_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "rows.csv")
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(FILE, encoding="utf-8")
    context = RunContext(load_config("mine.yaml"))

    copy = context.for_other_process()

    assert copy.loaded.text == FILE
    assert copy.name == context.name == "mine"
    assert copy.loaded.folder == tmp_path.resolve()
    assert copy.loaded.origins == context.loaded.origins
    assert copy.config == context.config


def test_a_run_of_a_file_that_extends_another_can_be_repeated_from_its_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", "rows.csv")
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(FILE, encoding="utf-8")
    Path("mine.yaml").write_text("extends: base.yaml\nseed: 7\n", encoding="utf-8")
    context = RunContext(load_config("mine.yaml"), quiet=True)
    assert context.for_other_process().loaded.text == context.loaded.text
    with context.open_run(Path("runs/mine")) as run:
        run.checkpoints.mkdir()
    Path("base.yaml").write_text(FILE.replace("base_model: base", "base_model: other"), encoding="utf-8")

    repeated = load_config("runs/mine/config.yaml")
    assert repeated.config == load_config("runs/mine/resolved.yaml").config == context.config
    assert str(repeated.text).startswith("# Merged from base.yaml, mine.yaml\nbase_model: base\n")
    assert "source: ${ROWS}" in str(repeated.text).replace('"', "")
    changed = RunContext(load_config("mine.yaml"), quiet=True)
    with pytest.raises(ResumeError, match="base_model: base -> other"), changed.open_run(Path("runs/mine")):
        pass


def test_an_output_that_would_overwrite_a_file_that_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    (files / "hub").mkdir(parents=True)
    for name in ("a.csv", "b.jsonl", "c.parquet", "d.csv", "hub/e.csv", "free.csv"):
        (files / name).write_text("text,answer\n", encoding="utf-8")
    Path(tmp_path / "link.csv").symlink_to("files/a.csv")
    monkeypatch.chdir(tmp_path)
    section = """data: {source: "a*.csv", validation: b.jsonl, test: {type: parquet, path: c.parquet}}
prompt: {retrieval: {type: random, dataset: missing.csv}}
"""
    (files / "mine.yaml").write_text(FILE.split("data:")[0] + section, encoding="utf-8")
    context = RunContext(load_config("files/mine.yaml"))
    for output, dataset, name in (
        ("files/a.csv", "rows.csv", "data.source"),
        ("link.csv", "rows.csv", "data.source"),
        ("files/b.jsonl", "rows.csv", "data.validation"),
        ("files/c.parquet", "rows.csv", "data.test"),
        ("files/d.csv", "files/*.csv", "the dataset"),
        ("files/d.csv", {"type": "csv", "path": "files/d.csv"}, "the dataset"),
        ("files/hub/e.csv", "files/hub", "the dataset"),
    ):
        with pytest.raises(DataError) as caught:
            context.check_not_read(Path(output), dataset)
        assert str(caught.value) == f"{output} is a file of {name}, which would be overwritten; name another output"
    for free in ("files/free.csv", "files/new.csv"):
        context.check_not_read(Path(free), [{"text": "a"}])


LEARNT = """
base_model: {type: scratch, size: nano, tokenizer: char}
input_features: [{name: text}]
output_features: [{name: label, type: category, head: linear}]
data: {source: rows.jsonl, split: {type: %s, probabilities: [0.6, 0.2, 0.2]}}
trainer: {type: finetune, batch_size: 8, epochs: 1}
"""
REDRAWN = (
    "the data has changed since the model was trained, and the test rows are drawn from it again: training rows may be "
    "among them. The results are not recorded in the run; to evaluate rows that the model has not seen, name their "
    "file with --dataset"
)


@pytest.mark.parametrize(("split", "is_redrawn"), [("random", True), ("hash, column: text", False)])
def test_test_rows_that_are_drawn_again_from_other_data_are_not_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    split: str,
    is_redrawn: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{letter} {number}", "label": letter}) for letter in "ab" for number in range(20)]
    Path("rows.jsonl").write_text("\n".join(rows))
    Path("run.yaml").write_text(LEARNT % split)
    Model("run.yaml", quiet=True).train()
    recorded = Path("runs/run/evaluations/test.jsonl")
    recorded.unlink()

    Model.load("runs/run", quiet=True).evaluate()
    assert recorded.exists()
    assert REDRAWN not in caplog.messages

    recorded.unlink()
    Path("rows.jsonl").write_text("\n".join([*rows, rows[0]]))
    Model.load("runs/run", quiet=True).evaluate()
    assert recorded.exists() is not is_redrawn
    assert (REDRAWN in caplog.messages) is is_redrawn
