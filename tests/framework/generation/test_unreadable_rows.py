"""Tests of unreadable rows: each has a line at its place in the predictions."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from partita.data.rows import BadRow, Rows
from partita.data.sources.mixed import joined
from partita.data.sources.sources import open_rows
from partita.generation.all_rows import AllRows
from partita.lm.scripted import ScriptedModel

from ...json_lines import read_json_lines

LINES = ["{bad", '{"question": "a"}', "[1]", '{"question": "b"}', '{"question": "c"}', '{"question": ', "{}"]
STATUSES = ["error", "ok", "error", "ok", "ok", "error", "skipped"]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    (tmp_path / "d.jsonl").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return open_rows("d.jsonl", folder=tmp_path)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_every_line_of_the_input_has_a_line_in_the_output(
    tmp_path: Path, rows: Rows, predict: Callable[..., Any], ending: str
) -> None:
    output = tmp_path / f"out.{ending}"
    result = predict(ScriptedModel(str.upper), rows, bad=rows.bad, output=output)
    assert (result.stats.rows, result.stats.ok, result.stats.errors, result.stats.skipped) == (7, 3, 3, 1)
    assert result[2]["error"] == "a row is a JSON object, this is a list"
    if ending == "parquet":
        lines = pq.read_table(output).to_pylist()
    elif ending == "csv":
        with output.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    else:
        lines = read_json_lines(output)
    assert [line["key"] for line in lines] == [f"d.jsonl:{number}" for number in range(1, 8)]
    assert [line["status"] for line in lines] == STATUSES
    assert [line["answer"] or None for line in lines] == [None, "A", None, "B", "C", None, None]
    assert all(line["error"] for line in lines if line["status"] != "ok")


def test_a_restarted_job_counts_unreadable_rows_once(rows: Rows, predict: Callable[..., Any]) -> None:
    predict(ScriptedModel(str.upper), rows, bad=rows.bad)
    again = predict(ScriptedModel(str.upper), rows, bad=rows.bad, retry_errors=True)
    assert (again.stats.rows, again.stats.resumed, again.stats.errors) == (7, 4, 3)
    assert [row["status"] for row in again] == STATUSES


def test_a_csv_file_keeps_its_order(tmp_path: Path, predict: Callable[..., Any]) -> None:
    (tmp_path / "d.csv").write_text("question,more\na,1\nb,2,3,4\nc,3\n", encoding="utf-8")
    rows = open_rows("d.csv", folder=tmp_path)
    result = predict(ScriptedModel(str.upper), rows, bad=rows.bad)
    assert [(row["key"], row["status"]) for row in result] == [
        ("d.csv:2", "ok"),
        ("d.csv:3", "error"),
        ("d.csv:4", "ok"),
    ]


def test_several_files_and_sources_keep_their_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"q": 1}\n{bad\n{"q": 2}\nbad}\n', encoding="utf-8")
    files = open_rows("*.jsonl", folder=tmp_path)
    mix = joined({"one": files, "two": open_rows("a.jsonl", folder=tmp_path)})
    everything = AllRows(mix, mix.bad)
    keys = [f"{file}:{number}" for file in ("one/a.jsonl", "one/b.jsonl", "two/a.jsonl") for number in range(1, 5)]
    assert [everything.key(index) for index in range(len(everything))] == keys
    values = [row.get("q") for row in everything.get(range(len(everything)))]
    assert values == [1, None, 2, None] * 3
    assert [row.get("q") for row in everything.get([11, 10, 1, 0])] == [None, 2, None, 1]


def test_bad_rows_of_other_data_are_at_the_end(make_rows: Callable[..., Rows]) -> None:
    some = make_rows([{"q": 1}])
    everything = AllRows(some, [BadRow("x:90", "x", 90, "not JSON", "{", num_before=80)])
    assert [everything.key(index) for index in range(2)] == ["data:1", "x:90"]
