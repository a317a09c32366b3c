import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from partita.cli.main import app
from partita.data.ledger import Ledger, UsedRows
from partita.data.preview import make_report, newest_run, read_report
from partita_schema.errors import DataError

pytestmark = pytest.mark.usefixtures("no_log")

Make = Callable[..., Any]
SCRATCH = {"type": "scratch", "tokenizer": "byte", "context_length": 20}


FILE = """
base_model: {type: scratch, size: nano, tokenizer: byte, context_length: 20}
input_features: [{name: question, type: text}]
output_features: [{name: answer, type: text}]
data: {source: rows.jsonl, validation: more.jsonl}
trainer: {type: finetune}
"""


def write_rows(folder: Path) -> None:
    good = [{"question": f"q{n}", "answer": "a"} for n in range(40)]
    bad = [{"question": " ", "answer": "x"}, {"question": "", "answer": "x"}, {"question": "q" * 17, "answer": "long!"}]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*bad, *good]) + "\n{torn")
    (folder / "more.jsonl").write_text(json.dumps({"question": "q", "answer": ""}) + "\n" + json.dumps(good[0]))


def test_the_ledger_of_a_configuration_counts_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path)
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["preview", "run.yaml", "--ledger", "--set", "data.split={type: fixed}"])
    assert shown.exit_code != 0  # there is no column `split`

    shown = CliRunner().invoke(app, ["preview", "run.yaml", "--ledger", "--set", "data.max_bad_rows=0"])

    assert shown.exit_code == 0, shown.output
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.output.splitlines() if "│" in line]
    training = next(line for line in lines if line[0] == "training")
    assert training == ["training", "42", "39", "1", "3", "0", "3"]
    assert ["validation", "2", "1", "0", "0", "0", "1"] in lines
    assert ["training", "2", "column question is missing or empty", "rows.jsonl:1"] in lines
    assert ["validation", "1", "column answer is missing or empty", "more.jsonl:1"] in lines
    assert "not JSON: Expecting property" in shown.output
    assert "rows.jsonl:44" in shown.output
    assert not (tmp_path / "runs").exists()


def test_the_newest_run_is_shown_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "new")):
        ledger = Ledger(Path("runs") / name, max_bad_rows=9)
        ledger.use(UsedRows(5), split="training")
        ledger.leave_out(f"{name}.csv:3", ["too long"], split="training", file="a.csv", number=3)
        ledger.save()
        os.utime(Path("runs") / name / "ledger.json", (number, number))

    newest = CliRunner().invoke(app, ["preview", "--ledger"]).output
    named = CliRunner().invoke(app, ["preview", "runs/old", "--ledger"]).output

    assert "new.csv:3" in newest
    assert "old.csv:3" in named
    assert "too long" in named


def test_a_ledger_without_bad_rows_is_reported(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=9)
    ledger.use(UsedRows(5000), split="training")
    ledger.save()

    shown = CliRunner().invoke(app, ["preview", str(tmp_path), "--ledger"]).output

    assert "5,000" in shown
    assert shown.endswith("no row is left out\n")


def test_a_run_without_a_ledger_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_report(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no ledger.json: no rows were read in that run; name the directory of another run, or a YAML "
        "file to read its data now"
    )
    with pytest.raises(DataError) as error:
        newest_run(tmp_path / "runs")
    assert str(error.value) == (
        f"there is no run with a ledger.json in {tmp_path}/runs; name the directory of a run, or a YAML file to read "
        "its data now"
    )


def test_a_stream_has_no_ledger_before_training(tmp_path: Path, make_config: Make) -> None:
    config = make_config(
        base_model=SCRATCH,
        data={"source": {"type": "jsonl", "path": "rows.jsonl", "streaming": True}},
        trainer={"type": "finetune", "max_steps": 3},
    )
    with pytest.raises(DataError) as error:
        make_report(config, folder=tmp_path)
    assert str(error.value) == (
        "a stream is read while it is trained on; name the directory of the run, or with --dataset some of its rows"
    )


def test_rows_without_answers_have_no_ledger(tmp_path: Path, make_config: Make) -> None:
    config = make_config(base_model=SCRATCH, trainer={"type": "none"})
    with pytest.raises(DataError, match=r"^the training rows have no answers, so none of them could be learned or sc"):
        make_report(config, folder=tmp_path, dataset=[{"question": str(n)} for n in range(3)])


def test_preview_without_a_file_asks_for_one() -> None:
    shown = CliRunner().invoke(app, ["preview"])
    assert shown.exit_code == 2
    assert "write the YAML file of the run" in shown.output
