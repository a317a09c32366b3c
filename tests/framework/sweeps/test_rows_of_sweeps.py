"""Tests of the rows of a sweep: those passed in Python, and those that have changed since trials were trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from partita import Sweep
from partita.data.run_data import open_run_data
from partita.runs.directory import RunDirectory
from partita.sweeps.passed_rows import PASSED, check_passed, named_dataset, read_rows, written_rows
from partita.sweeps.same_rows import check_same_rows
from partita_schema.errors import DataError, ResumeError
from partita_schema.load import load_config
from partita_schema.records import FORMAT_VERSION

from ...json_lines import write_json_lines

ROWS = [{"text": f"{number} of {number % 7}", "label": "odd" if number % 2 else "even"} for number in range(40)]
KINDS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "frame": pd.DataFrame,
    "columns": lambda rows: {key: [row[key] for row in rows] for key in rows[0]},
    "dataset": Dataset.from_list,
    "splits": lambda rows: DatasetDict({"train": Dataset.from_list(rows[:30]), "test": Dataset.from_list(rows[30:])}),
}


def trial_of(folder: Path, name: str, *, dataset: Any = None, **data: Any) -> Path:
    """Write the manifest of a trial in a sweep, as training writes it."""
    config = load_config(
        {
            "base_model": {"type": "scratch", "size": "nano"},
            "input_features": [{"name": "text"}],
            "output_features": [{"name": "label", "type": "category"}],
            "data": {"source": "rows.jsonl", **data} if dataset is None else data,
            "trainer": {"type": "finetune"},
        }
    ).config
    run = folder / "trials" / name
    run.mkdir(parents=True)
    record = open_run_data(config, folder=folder, dataset=dataset).record()
    settings = config.model_dump(mode="json")
    RunDirectory(run, config=config).note(format_version=FORMAT_VERSION, config=settings, data=record, status="done")
    return run


def check(folder: Path, *, dataset: Any = None, finished: bool = True) -> None:
    check_same_rows(folder, origin=folder, dataset=dataset, finished=finished)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_passed_in_python_are_read_by_trials_as_they_are(tmp_path: Path, kind: str) -> None:
    dataset = KINDS[kind](ROWS)
    check_passed(dataset)
    assert named_dataset(dataset) == PASSED
    with written_rows(dataset, tmp_path) as path:
        assert path is not None
        read = read_rows(path)
    assert type(read) is type(dataset)
    assert not list(tmp_path.iterdir())
    trial_of(tmp_path, "000-0", dataset=dataset)
    check(tmp_path, dataset=read)
    with pytest.raises(ResumeError, match="rows have changed since"):
        check(tmp_path, dataset=KINDS[kind]([*ROWS[:-1], {"text": "new", "label": "odd"}]))


def test_rows_passed_in_python_replace_no_file_of_the_user(tmp_path: Path) -> None:
    own = tmp_path / "dataset.pickle"
    own.write_bytes(b"of the user")
    with written_rows(ROWS, tmp_path) as path:
        assert path is not None
        assert path.name.startswith(".")
    assert own.read_bytes() == b"of the user"


@pytest.mark.parametrize("dataset", [None, "rows.csv", Path("rows.csv"), {"type": "csv", "path": "rows.csv"}])
def test_the_name_of_a_dataset_is_sent_to_trials_as_it_is(tmp_path: Path, dataset: Any) -> None:
    check_passed(dataset)
    json.dumps(named_dataset(dataset))
    assert named_dataset(dataset) in (dataset, str(dataset))
    with written_rows(dataset, tmp_path) as path:
        assert path is None


def test_rows_that_cannot_be_pickled_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught, written_rows([{"text": lambda: "a"}], tmp_path):
        ...
    assert str(caught.value).startswith("the dataset cannot be sent to the processes of trials (")
    assert str(caught.value).endswith("); write it to a file, and name that")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([*ROWS, *ROWS[:8]], "36 rows then, 43 rows now; restore"),
        (ROWS[::-1], "36 rows then, 36 rows now with other content; restore"),
    ],
)
def test_rows_of_a_file_that_have_changed_are_refused(tmp_path: Path, rows: list[Any], expected: str) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    split = {"type": "random", "probabilities": [0.9, 0.1, 0.0]}
    run = trial_of(tmp_path, "000-0", split=split)
    check(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ResumeError) as caught:
        check(tmp_path)
    message = f"the training rows have changed since {run} was trained: {expected} them, or name another folder with "
    assert str(caught.value) == f"{message}--folder"


def test_every_source_among_the_values_is_compared_and_each_only_once(tmp_path: Path) -> None:
    for name in ("rows", "other"):
        write_json_lines(tmp_path / f"{name}.jsonl", ROWS)
    trial_of(tmp_path, "000-0")
    trial_of(tmp_path, "001-1", batching={"type": "bucket"})
    last = trial_of(tmp_path, "002-2", source="other.jsonl")
    check(tmp_path)
    write_json_lines(tmp_path / "other.jsonl", ROWS[1:])
    with pytest.raises(ResumeError, match=f"since {last} was trained"):
        check(tmp_path)


def test_new_validation_rows_are_other_rows(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    write_json_lines(tmp_path / "valid.jsonl", ROWS[:5])
    trial_of(tmp_path, "000-0", validation="valid.jsonl")
    write_json_lines(tmp_path / "valid.jsonl", ROWS[:6])
    with pytest.raises(ResumeError, match=r"the validation rows have changed since .*: 5 rows then, 6 rows now; "):
        check(tmp_path)


def test_a_finished_sweep_without_its_rows_is_shown_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ROWS)
    trial_of(tmp_path, "000-0")
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl does not exist"):
        check(tmp_path, finished=False)
    check(tmp_path, finished=True)
    assert caplog.messages[0].startswith(
        "the rows of the trials cannot be read any more, and are not compared: data.source: rows.jsonl does not exist"
    )


@pytest.mark.long
def test_trials_with_rows_passed_in_python_are_the_runs_of_a_file_with_them(colours: Any, tmp_path: Path) -> None:
    config = colours.config(
        trainer={"epochs": 1, "evaluate_generated": False, "evaluate_test": False},
        sweep={"parameters": {"trainer.learning_rate": [0.01, 0.001]}, "sampler": "grid", "workers": 2},
    )
    rows = colours.rows(64)
    write_json_lines(tmp_path / "rows.jsonl", rows)
    named = Sweep(config, quiet=True).run(tmp_path / "rows.jsonl", tmp_path / "file")
    passed = Sweep(config, quiet=True).run(pd.DataFrame(rows), tmp_path / "frame")
    assert [passed.value_of(trial) for trial in passed.trials] == [named.value_of(trial) for trial in named.trials]
    assert json.loads((tmp_path / "frame" / "sweep.json").read_text())["settings"]["dataset"] == PASSED
    assert not list((tmp_path / "frame").glob("*.pickle"))
    assert Sweep(config, quiet=True).run(pd.DataFrame(rows), tmp_path / "frame") == passed
    with pytest.raises(ResumeError, match="the training rows have changed since"):
        Sweep(config, quiet=True).run(pd.DataFrame(rows[1:]), tmp_path / "frame")
    with pytest.raises(ResumeError, match=f"holds a sweep of another file:\n  dataset: {PASSED} -> "):
        Sweep(config, quiet=True).run(tmp_path / "rows.jsonl", tmp_path / "frame")


@pytest.mark.long
def test_the_rows_of_folds_are_compared_as_well(colours: Any, tmp_path: Path) -> None:
    config = colours.config(
        trainer={"epochs": 1, "evaluate_generated": False},
        sweep={"parameters": {"trainer.learning_rate": [0.01]}, "sampler": "grid"},
    )
    config["data"]["split"] = {"type": "kfold", "folds": 2}
    rows = colours.rows(32)
    Sweep(config, quiet=True).run(rows, tmp_path / "sweep")
    with pytest.raises(ResumeError, match=r"000-[0-9a-f]{8}/fold-1 was trained: 16 rows then, 15 rows now"):
        Sweep(config, quiet=True).run(rows[:-1], tmp_path / "sweep")
