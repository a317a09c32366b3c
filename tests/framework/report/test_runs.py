"""`Runs` in Python: a table of runs, single runs, and comparisons."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from partita import DataError, Runs
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path

from ..recorded_results import write_row_results
from ..run_directories import MakeRun


@pytest.fixture
def folder(make_run: MakeRun, tmp_path: Path) -> Path:
    """Return a folder with the runs a, b and damaged."""
    for name, right in (("a", 12), ("b", 5)):
        run = make_run(name, note={"metrics": {"test": {"loss": 1 / right, "team.accuracy": right / 20}}, "steps": 4})
        rows = [RecordedRow(str(i), outputs={"team": OutputResult("x", "x", i < right)}) for i in range(20)]
        header = EvaluationHeader("test", "result", "f", outputs={"team": "category"})
        write_row_results(evaluation_path(run, "test"), header, rows)
    (make_run("damaged") / "manifest.json").write_text("{")
    return tmp_path / "runs"


def test_the_frame_has_a_row_per_run_and_a_column_per_metric(folder: Path) -> None:
    frame = Runs(folder).frame()
    assert list(frame.index) == ["a", "b", "damaged"]
    assert list(frame["status"]) == ["done", "done", "unreadable"]
    assert frame.loc["a", "test.team.accuracy"] == 0.6
    assert frame.sort_values("test.loss").index[0] == "a"
    assert pd.isna(frame.loc["damaged", "test.loss"])
    assert "is not JSON" in str(frame.loc["damaged", "problem"])
    assert (frame["bytes"] > 0).all()


def test_an_empty_folder_has_an_empty_frame(tmp_path: Path) -> None:
    assert Runs(tmp_path).frame().empty
    assert list(Runs(tmp_path)) == []


def test_runs_are_found_by_name_and_sorted(folder: Path) -> None:
    runs = Runs(folder)
    assert repr(runs) == f"Runs('{folder}', 3 runs)"
    assert (len(runs), [run.name for run in runs]) == (3, ["a", "b", "damaged"])
    assert runs["b"].folder == folder / "b"
    assert [run.name for run in runs.sorted("metric", metric="accuracy")] == ["a", "b", "damaged"]
    with pytest.raises(DataError, match=rf"there is no run c in {folder}; there are"):
        _ = runs["c"]


def test_runs_are_compared_by_name(folder: Path) -> None:
    comparison = Runs(folder).compare("a", "b", max_examples=3)
    assert comparison.rows == 20
    assert len(comparison.pairs[0].disagreements) == 3
    frame = comparison.frame()
    assert list(frame.columns[:4]) == ["run", "metric", "first", "second"]
    accuracy = frame[frame["metric"] == "team.accuracy"].iloc[0]
    assert (accuracy["run"], accuracy["difference"], accuracy["verdict"]) == ("b", pytest.approx(-0.35), "worse")
    with pytest.raises(DataError, match="there is no run c in"):
        Runs(folder).compare("a", "c")


def test_a_comparison_without_rows_has_an_empty_frame(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a"), make_run("b")
    frame = Runs(tmp_path / "runs").compare("a", "b").frame()
    assert (len(frame), list(frame.columns[-3:])) == (0, ["p", "test", "verdict"])


@pytest.mark.long  # it starts a process
def test_runs_are_listed_without_torch_and_pandas(folder: Path) -> None:
    program = f"""
import sys
from partita import Runs
list(Runs({str(folder)!r}))
print({{"torch", "pandas", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
