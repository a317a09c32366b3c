"""Runs of a folder are listed with status, metric, size and age; a damaged one does not hide the others."""

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest

from partita.runs.listing import data_of, in_order, model_of, read_runs, read_summary
from partita.runs.locks import is_locked, lock
from partita_schema.errors import DataError

from ..run_directories import MakeRun, write_run

SCORES = {"loss": 0.5, "team.accuracy": 0.75, "team.macro_f1": 0.7, "team.n": 20, "exact_match": 0.75}


def statuses(folder: Path) -> dict[str, str]:
    return {run.name: run.status for run in read_runs(folder)}


def test_a_run_has_its_status_metric_model_data_and_size(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("tickets", note={"metrics": {"validation": SCORES | {"team.accuracy": 0.5}, "test": SCORES}, "steps": 4})
    (run,) = read_runs(tmp_path / "runs")
    metric = run.metric()
    assert metric is not None
    assert (metric.name, metric.split, metric.value) == ("team.accuracy", "test", 0.75)
    assert (run.name, run.status, run.problem) == ("tickets", "done", None)
    assert (model_of(run.config), data_of(run.manifest)) == ("owner/small-model", "data/tickets.csv")
    sizes = [path.stat().st_size for path in run.folder.rglob("*") if path.is_file()]
    assert run.bytes == sum(sizes) > 6100
    record = run.record()
    assert record["metric"] == {"name": "team.accuracy", "split": "test", "value": 0.75}
    assert (record["steps"], record["bytes"], record["created"] <= record["updated"]) == (4, run.bytes, True)


def test_a_run_whose_process_lives_is_running_and_otherwise_dead(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("tickets", status="running")
    assert statuses(tmp_path / "runs") == {"tickets": "dead"}
    with lock(folder):
        assert statuses(tmp_path / "runs") == {"tickets": "running"}
    assert not is_locked(folder)


def test_looking_at_a_run_does_not_lock_it(make_run: MakeRun) -> None:
    folder = make_run("tickets")
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_locked(folder)


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_the_error_of_a_failed_run_is_its_problem(status: str, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("tickets", status=status, note={"error": "OutOfMemory: too long"})
    (run,) = read_runs(tmp_path / "runs")
    assert (run.status, run.problem) == (status, "OutOfMemory: too long")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is not JSON .*; restore it, or start a new run"),
        (b'{"format_version": 99}', r"was written by a newer partita \(format 99\); update partita to read it"),
        (b'{"format_version": 1, "status": "asleep"}', "is not a partita manifest: status"),
    ],
    ids=["empty", "newer", "unknown status"],
)
def test_a_damaged_run_is_listed_with_its_reason_beside_the_others(
    text: bytes, problem: str, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("good")
    (make_run("damaged") / "manifest.json").write_bytes(text)
    damaged, good = read_runs(tmp_path / "runs")
    assert (damaged.status, good.status) == ("unreadable", "done")
    assert damaged.problem is not None
    assert damaged.metric() is None
    assert re.search(problem, damaged.problem)


@pytest.mark.parametrize(
    "note",
    [
        {"config": {"output_features": ["team"]}},
        {"config": {"input_features": [{"name": "a"}]}},
        {"config": {"trainer": "finetune"}},
        {"config": {"data": "rows.csv"}},
        {"data": {"training": 4}},
    ],
    ids=str,
)
def test_a_manifest_with_other_parts_is_listed_as_unreadable(note: Any, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("odd", note=note)
    (run,) = read_runs(tmp_path / "runs")
    assert run.status == "unreadable"
    assert run.problem is not None
    assert run.problem.endswith("has a config, metrics or data that partita does not write; restore it")
    assert run.record()["metric"] is None


def test_runs_of_sweeps_are_found_below_their_folders(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("first", "sweeps/rates/trials/000-ab", "sweeps/rates/trials/001-cd", "first/rounds/1", ".hidden/run"):
        make_run(name)
    assert list(statuses(tmp_path / "runs")) == ["first", "sweeps/rates/trials/000-ab", "sweeps/rates/trials/001-cd"]
    assert list(statuses(tmp_path / "runs" / "sweeps")) == ["rates/trials/000-ab", "rates/trials/001-cd"]


def test_links_to_folders_in_the_list_or_above_it_are_left_out_and_others_followed(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = make_run("tickets")
    (folder.parent / "latest").symlink_to(folder)
    (folder.parent / "loop").symlink_to(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (folder.parent / "a").symlink_to(tmp_path / "elsewhere")
    make_run("b").rename(tmp_path / "elsewhere" / "b")
    assert list(statuses(tmp_path / "runs")) == ["a/b", "tickets"]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("link", "manifest.json is a link to a file that does not exist; restore the file"),
        ("folder", "manifest.json cannot be read: Is a directory; restore it"),
    ],
)
def test_a_manifest_that_is_no_file_is_listed_with_advice(kind: str, problem: str, tmp_path: Path) -> None:
    manifest = tmp_path / "runs" / "odd" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    if kind == "link":
        manifest.symlink_to("nowhere")
    else:
        manifest.mkdir()
    (run,) = read_runs(tmp_path / "runs")
    assert run.status == "unreadable"
    assert str(run.problem).endswith(problem)


def test_a_manifest_without_permission_is_listed_with_advice(without_root: Path) -> None:
    folder = write_run(without_root, "tickets")
    (folder / "manifest.json").chmod(0)
    (run,) = read_runs(without_root / "runs")
    assert str(run.problem).endswith("manifest.json cannot be read: Permission denied; change the permissions there")


def test_outputs_without_a_run_are_listed_and_other_folders_are_not(tmp_path: Path) -> None:
    (tmp_path / "runs" / "waiter" / "transcripts").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "file.txt").touch()
    assert statuses(tmp_path / "runs") == {"waiter": "outputs"}


def test_a_missing_folder_and_a_run_are_errors(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*nowhere; name the folder that holds the runs, such as"):
        read_runs(tmp_path / "nowhere")
    folder = make_run("tickets")
    with pytest.raises(DataError, match=f"{folder} is a run itself; write partita runs show {folder}, or the folder"):
        read_runs(folder)


def test_runs_are_ordered_by_date_name_size_and_metric(make_run: MakeRun, tmp_path: Path) -> None:
    for name, loss in (("c", 0.5), ("a", 0.2), ("b", 0.9)):
        make_run(name, output_features=[{"name": "team", "type": "text"}], note={"metrics": {"test": {"loss": loss}}})
    make_run("d")  # without metrics
    for age, name in enumerate("dbca"):
        manifest = tmp_path / "runs" / name / "manifest.json"
        text = manifest.read_text().replace('"updated"', '"before"').replace('"checksum"', '"none"')
        manifest.write_text(text)
        os.utime(manifest, (1000 - age, 1000 - age))
    (tmp_path / "runs" / "b" / "more").write_bytes(b"x" * 9000)
    runs = read_runs(tmp_path / "runs")

    def names(*order: Any, **metric: Any) -> str:
        return "".join(run.name for run in in_order(runs, *order, **metric))

    assert names("date") == "dbca"
    assert names("name") == "abcd"
    assert names("size")[0] == "b"
    assert names("metric") == "acbd"


@pytest.mark.parametrize(("metric", "best"), [("accuracy", "right"), ("team.accuracy", "right"), ("loss", "sure")])
def test_the_best_run_has_the_highest_or_the_lowest_value(
    metric: str, best: str, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("right", note={"metrics": {"test": {"loss": 0.6, "team.accuracy": 0.9}}})
    make_run("sure", note={"metrics": {"test": {"loss": 0.3, "team.accuracy": 0.8}}})
    assert in_order(read_runs(tmp_path / "runs"), "metric", metric=metric)[0].name == best


@pytest.mark.parametrize(
    ("config", "metrics", "expected"),
    [
        ({"trainer": {"type": "finetune", "validation_metric": "macro_f1"}}, SCORES, "team.macro_f1"),
        ({"output_features": [{"name": "a", "type": "text"}, {"name": "b", "type": "text"}]}, SCORES, "exact_match"),
        (
            {"output_features": [{"name": "n", "type": "number", "head": "linear"}]},
            {"loss": 1.0, "n.exact_match": 0.0, "n.mae": 2.0},
            "n.mae",
        ),
        ({}, {"loss": 1.0, "odd": None}, "loss"),
        ({}, {}, None),
    ],
    ids=["validation metric", "several outputs", "head", "only a loss", "none"],
)
def test_the_main_metric_is_that_of_the_output(
    config: dict[str, Any], metrics: dict[str, Any], expected: str | None, make_run: MakeRun
) -> None:
    metric = read_summary(make_run("tickets", note={"metrics": {"test": metrics}}, **config)).metric()
    assert (metric and metric.name) == expected


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"type": "scratch", "architecture": "bert", "size": "nano"}, "new bert nano"),
        ({"type": "embedding_bag"}, "new embedding_bag"),
        (None, ""),
    ],
    ids=str,
)
def test_a_new_model_is_named_by_its_architecture(base: Any, expected: str) -> None:
    assert model_of({"base_model": base}) == expected


def test_the_data_that_a_command_names_replace_the_source() -> None:
    config = {"data": {"source": "rows.csv"}}
    for command in (
        "partita train a.yaml --dataset 'my rows.csv'",
        "partita train a.yaml '--dataset=my rows.csv' --yes",
    ):
        assert data_of({"config": config, "command": command}) == "my rows.csv"
    assert data_of({"config": config, "command": "partita train a.yaml --run x"}) == "rows.csv"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "rows.csv"}, "rows.csv"),
        ({"mix": [{"source": "a.csv"}, {"source": "b.csv"}]}, "a.csv, b.csv"),
        ({"source": ["a.csv", "b.csv"]}, "a.csv, b.csv"),
        ({"source": {"type": "hub", "name": "owner/data"}}, "owner/data"),
        ({"source": {"type": "custom", "target": "rows:Rows"}}, "rows:Rows"),
        ({"test": "test.csv"}, "test.csv"),
        ({}, ""),
    ],
    ids=str,
)
def test_the_data_are_named_by_their_sources(data: Any, expected: str) -> None:
    assert data_of({"config": {"data": data}}) == expected
