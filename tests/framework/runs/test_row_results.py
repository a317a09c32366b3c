"""Row results of an evaluation are read as they were written; damage is an error with its line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from partita.report.evaluation import read_evaluation
from partita.runs.row_results import (
    EvaluationHeader,
    OutputResult,
    RecordedRow,
    evaluation_path,
    read_header,
)
from partita_schema.errors import DataError

from ..recorded_results import read_rows, write_row_results

HEADER = EvaluationHeader(split="test", model="result", fingerprint="f", step=3, outputs={"label": "category"})
ROWS = [
    RecordedRow(
        "rows.csv:2", "a\nprompt \u2028", "yes", 0.5, 2, {"label": OutputResult("yes", "yes", True, {"yes": -0.1})}
    ),
    RecordedRow("rows.csv:3", "", None, None, None, {}),
    RecordedRow("rows.csv:4", "b", "no", outputs={"label": OutputResult("yes", "no", False, None, {"query": "q"})}),
    RecordedRow("rows.csv:5", "the bill", context="user: two teas\nassistant: here they are"),
]


def test_row_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = evaluation_path(tmp_path, "test")
    write_row_results(path, HEADER, ROWS)
    assert read_header(path) == HEADER
    assert read_rows(path) == ROWS
    assert path == tmp_path / "evaluations" / "test.jsonl"
    assert evaluation_path(tmp_path, "test", base=True).name == "test-base.jsonl"


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"key": 1, "unknown": 2}'], ids=["empty", "torn", "list", "key"])
def test_a_damaged_row_is_an_error_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = evaluation_path(tmp_path, "test")
    write_row_results(path, HEADER, ROWS)
    first, second, *_ = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, second, line, b""]))
    with pytest.raises(DataError, match=r"test\.jsonl, line 3, is damaged; evaluate the run again"):
        read_evaluation(path)


@pytest.mark.parametrize("left", [0, 3])
def test_a_file_that_was_cut_after_a_line_is_an_error(left: int, tmp_path: Path) -> None:
    path = evaluation_path(tmp_path, "test")
    write_row_results(path, replace(HEADER, rows=4), ROWS)
    assert len(read_evaluation(path)) == 4
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 1 + left]))
    message = f"{path} is damaged: its first line says 4 rows, but only {left} of them follow; evaluate the run again"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        read_evaluation(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"test\.jsonl cannot be read: No such file or directory; evaluate the run again"
    ):
        read_header(evaluation_path(tmp_path, "test"))


def test_a_newer_format_is_an_error(tmp_path: Path) -> None:
    path = evaluation_path(tmp_path, "test")
    write_row_results(path, EvaluationHeader("test", "result", "f", format=99), [])
    with pytest.raises(DataError, match=r"written by a newer partita \(format 99\); update partita to read it"):
        read_header(path)
