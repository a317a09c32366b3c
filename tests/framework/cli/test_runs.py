"""`partita runs`: the list, the details of a run, and the removal, at 80 columns, with their errors."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita.runs.listing import read_summary
from partita.runs.locks import lock
from partita.runs.opening import open_run
from partita_schema.load import LoadedConfig, load_config
from partita_trainers.checkpoints.file_sums import summed

from ..conftest import Command

SETTINGS: dict[str, Any] = {
    "base_model": "owner/a-rather-small-model",
    "input_features": [{"name": "message", "type": "text"}],
    "output_features": [{"name": "team", "type": "category"}],
    "data": {"source": "tickets-of-the-last-three-years.csv"},
    "trainer": {"type": "finetune", "epochs": 3},
}
METRICS = {"test": {"loss": 0.5, "team.accuracy": 0.75, "team.n": 2000.0}}
Printed = tuple[int, str, str]
Call = Callable[..., Printed]


@pytest.fixture
def call(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Call:
    """Run `partita` in an empty folder with 80 columns; return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))

    def run(*words: object) -> Printed:
        code = command(*words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def make_run(name: str, *, status: str = "done", overrides: tuple[str, ...] = (), **note: Any) -> Path:
    file, folder = Path("tickets.yaml"), Path("runs") / name
    file.write_text(yaml.safe_dump(SETTINGS))
    loaded: LoadedConfig = load_config(file, overrides=list(overrides))
    with open_run(folder, config=loaded.config, text=loaded.text, resolved="", origin=Path()) as run:
        for path in (folder / "checkpoints" / "step-000004", folder / "evaluations"):
            path.mkdir(parents=True)
            (path / "data").write_bytes(b"x" * 5_000)
        if status == "done":
            with summed(folder / "model"):
                (folder / "model" / "model.safetensors").write_bytes(b"x" * 2_000_000)
        run.note(status=status, **note)
    return folder


def assert_fits(text: str) -> None:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text


def test_the_list_fits_80_columns_and_keeps_names_and_metrics_whole(call: Call) -> None:
    make_run("tickets", metrics=METRICS, steps=40)
    make_run("a-run-with-a-name-that-is-far-longer-than-its-column", status="interrupted", metrics=METRICS)
    code, out, _ = call("runs")
    assert code == 0
    assert_fits(out)
    assert out.splitlines()[0].split() == ["run", "status", "model", "data", "metric", "age", "size"]
    assert re.search(r"^tickets +done +a-r\S*… +tick\S*… +accuracy 0.750 +\d s +2.0\d MB", out, re.MULTILINE)
    names = "".join(line.split(" ")[0] for line in out.splitlines()[1:])
    assert "a-run-with-a-name-that-is-far-longer-than-its-column" in names


def test_names_of_runs_are_broken_after_separators_and_not_inside_words(call: Call) -> None:
    name = "reviews/002-31629531-of-yesterday-evening/fold-3"
    make_run(name, metrics=METRICS)
    _, out, _ = call("runs")
    assert_fits(out)
    lines = [line.split(" ")[0] for line in out.splitlines()[1:]]
    assert "".join(lines) == name
    assert len(lines) > 2
    assert all(line.endswith(("-", "/")) for line in lines[:-1])


def test_the_list_gives_the_reason_of_a_run_that_cannot_be_read(call: Call) -> None:
    make_run("tickets")
    (make_run("damaged") / "manifest.json").write_text("[]")
    failed = make_run("full", status="failed", error="OSError: [bold]no space[/bold]")
    code, out, _ = call("runs", "runs", "--sort", "name")
    assert code == 0
    assert "\ndamaged: runs/damaged/manifest.json is not a JSON object; restore it, or start a new run\n" in out
    assert f"\n{failed.name}: OSError: [bold]no space[/bold]\n" in out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["damaged", "full", "tickets"]


def test_outputs_without_a_run_are_listed_by_what_they_are(call: Call) -> None:
    Path("runs/waiter/transcripts").mkdir(parents=True)
    _, out, _ = call("runs")
    assert re.search(r"^waiter  outputs +transcripts +", out, re.MULTILINE)


def test_the_list_as_json_has_every_run_with_its_metrics(call: Call) -> None:
    make_run("tickets", metrics=METRICS)
    make_run("b", metrics={"test": {"loss": 0.25}})
    code, out, _ = call("runs", "--json", "--sort", "metric", "--metric", "loss")
    assert code == 0
    runs = json.loads(out)
    assert [run["name"] for run in runs] == ["b", "tickets"]
    assert runs[1]["metrics"] == METRICS
    assert runs[0]["metric"] == {"name": "loss", "split": "test", "value": 0.25}


def test_a_folder_named_like_a_command_and_an_empty_one_are_listed(call: Call) -> None:
    Path("show").mkdir()
    assert call("runs", "./show") == (0, "there are no runs in show\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "error: there is no folder nowhere; name the folder that holds the runs, such as runs\n"),
        (["--metric", "f1"], "--metric: no run has f1; they have loss, team.accuracy, team.n\n"),
        (["runs/tickets"], "error: runs/tickets is a run itself; write partita runs show runs/tickets, or the folder"),
        (["show", "runs/ticket"], "error: runs/ticket is not a run directory; did you mean runs/tickets?"),
        (["show", "runs"], "error: runs is not a run directory; it holds the runs runs/tickets (done)\n"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_an_error_with_advice(words: list[str], message: str, call: Call) -> None:
    make_run("tickets", metrics=METRICS)
    code, out, err = call("runs", *words)
    assert (code, out) == (2, "")
    assert err.startswith(message)


def test_the_details_of_a_run_fit_80_columns(call: Call) -> None:
    sizes = {"training": {"rows": 16, "origin": "tuned"}, "evaluation": {"rows": 1064, "origin": "cached"}}
    data = {split: {"rows": 1200, "fingerprint": "f"} for split in ("training", "validation", "test")}
    note = {"steps": 1200, "best_step": 900, "stopped_early": True, "batch_sizes": sizes, "data": data}
    make_run("tickets", metrics={"validation": METRICS["test"], **METRICS}, ledger={"training": 12}, **note)
    code, out, _ = call("runs", "show", "runs/tickets")
    assert code == 0
    assert_fits(out)
    for line in (
        r"run          runs/tickets",
        r"status       done \(\d s ago\)",
        r"model        owner/a-rather-small-model",
        r"data         tickets-of-the-last-three-years.csv",
        r"rows         1,200 training, 1,200 validation, 1,200 test; 12 rows left out",
        r"outputs      team \(category\)",
        r"settings     trainer.type finetune, .*",
        r"steps        1,200, the best at step 900, stopped early",
        r"batch sizes  training 16 \(tuned\), evaluation 1,064 \(cached\)",
        r"created      \S+, 1 start",
        r"metric +validation +test",
        r"team.accuracy +0.750 +0.750",
        r"team.n +2,000 +2,000",
        r"  model/ +2.00 MB  the model",
        r"  checkpoints/ +5.00 kB  to resume or extend the training",
        r"  partita evaluate runs/tickets",
    ):
        assert re.search(rf"^{line} *$", out, re.MULTILINE), line


def test_the_rows_of_a_stream_are_not_counted_in_the_details(call: Call) -> None:
    make_run("tickets", data={"training": {"rows": None, "fingerprint": "f"}, "test": {"rows": 40, "fingerprint": "f"}})
    code, out, _ = call("runs", "show", "runs/tickets")
    assert code == 0
    assert re.search(r"^rows +40 test *$", out, re.MULTILINE)


def test_the_details_as_json_are_one_object(call: Call) -> None:
    make_run("tickets", metrics=METRICS)
    code, out, _ = call("runs", "show", "runs/tickets", "--json")
    assert (code, json.loads(out)["metrics"]) == (0, METRICS)


@pytest.mark.parametrize("overrides", [(), ("trainer.epochs=7", "base_model=other model")], ids=["file", "set"])
def test_an_unfinished_run_names_the_command_that_continues_it(overrides: tuple[str, ...], call: Call) -> None:
    make_run("tickets", status="interrupted", overrides=overrides)
    _, out, _ = call("runs", "show", "runs/tickets")
    options = """ --set 'base_model="other model"' --set trainer.epochs=7.0""" if overrides else ""
    assert out.endswith(f"\nnext\n  partita train tickets.yaml --run runs/tickets{options}\n")


def test_the_command_that_continues_a_run_names_its_rows(call: Call) -> None:
    make_run("tickets", status="interrupted", command="partita train tickets.yaml --dataset 'my rows.csv' --run x")
    _, out, _ = call("runs", "show", "runs/tickets")
    assert re.search(r"^data +my rows.csv *$", out, re.MULTILINE)
    assert out.endswith("\nnext\n  partita train tickets.yaml --run runs/tickets --dataset 'my rows.csv'\n")


def test_the_command_that_continues_a_run_has_its_configuration(call: Call) -> None:
    folder = make_run("tickets", status="interrupted", overrides=("trainer.epochs=7", "base_model=other model"))
    again = load_config(Path("tickets.yaml"), overrides=['base_model="other model"', "trainer.epochs=7.0"])
    assert again.config.model_dump(mode="json") == read_summary(folder).config


def test_the_commands_that_use_a_run_are_quoted_for_a_shell(call: Call) -> None:
    make_run("my tickets")
    _, out, _ = call("runs", "show", "runs/my tickets")
    assert out.splitlines()[-2:] == [
        "  partita predict 'runs/my tickets' --dataset ROWS --output FILE",
        "  partita evaluate 'runs/my tickets'",
    ]


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("partita train a.yaml b.yaml --run old --set seed=3", "partita train a.yaml b.yaml --set seed=3 --run runs/t"),
        ("partita train a.yaml --run=old", "partita train a.yaml --run runs/t"),
        ("partita sweep a.yaml", "partita sweep a.yaml"),
    ],
)
def test_a_run_of_several_files_or_of_a_sweep_is_continued_with_its_command(
    recorded: str, expected: str, call: Call
) -> None:
    make_run("t", status="interrupted", command=recorded)
    Path("tickets.yaml").unlink()
    _, out, _ = call("runs", "show", "runs/t")
    assert out.endswith(f"\nnext\n  {expected}\n")


def test_a_trial_is_continued_by_its_sweep(call: Call) -> None:
    make_run("sweeps/s/trials/001-ab", status="interrupted")
    Path("runs/sweeps/s/sweep.json").write_text("{}")
    _, out, _ = call("runs", "show", "runs/sweeps/s/trials/001-ab")
    assert "\nnext\n  partita sweep FILE --folder runs/sweeps/s\n  FILE: the file of the sweep" in out


def test_a_run_whose_file_has_changed_says_where_its_copy_is(call: Call, tmp_path: Path) -> None:
    make_run("tickets", status="failed")
    Path("tickets.yaml").write_text("{}")
    _, out, _ = call("runs", "show", "runs/tickets")
    assert "\n  partita train FILE --run runs/tickets\n" in out
    assert f"\n  FILE: its file in {tmp_path} has changed or is gone; runs/tickets/config.yaml is a copy\n" in out


@pytest.mark.parametrize(
    ("status", "line"),
    [("dead", "dead: its process ended without recording why, such as after a kill"), ("running", "running (")],
)
def test_a_running_run_and_a_dead_one_differ(status: str, line: str, call: Call) -> None:
    folder = make_run("tickets", status="running")
    if status == "running":
        with lock(folder):
            _, out, _ = call("runs", "show", folder)
            assert "it is running; press Ctrl-C in its terminal to interrupt it" in out
    else:
        _, out, _ = call("runs", "show", folder)
        assert "partita train tickets.yaml --run runs/tickets" in out
    assert line in out


def test_a_damaged_run_is_shown_with_its_reason(call: Call) -> None:
    folder = make_run("tickets")
    (folder / "manifest.json").write_text("{")
    code, out, _ = call("runs", "show", folder)
    assert code == 0
    assert re.search(r"^problem +runs/tickets/manifest.json is not JSON", out, re.MULTILINE)


def test_nothing_is_removed_without_an_answer(call: Call) -> None:
    folder = make_run("tickets")
    code, out, err = call("runs", "clean")
    assert code == 2
    assert out == "5.00 kB  runs/tickets: checkpoints of a finished run".ljust(80) + "\n5.00 kB in 1 place\n"
    assert err == (
        "error: nothing was removed: standard input is no terminal to ask on; add --yes to remove all of it\n"
    )
    assert (folder / "checkpoints" / "step-000004").exists()


def test_yes_removes_what_was_listed(call: Call) -> None:
    folder = make_run("tickets")
    code, out, err = call("runs", "clean", "--yes")
    assert (code, err) == (0, "")
    assert out.endswith("5.00 kB in 1 place\nremoved 5.00 kB\n")
    assert not (folder / "checkpoints").exists()
    assert call("runs", "clean") == (0, "there is nothing to remove in runs\n", "")


def test_old_runs_are_removed_and_files_of_the_user_reported(call: Call) -> None:
    for name in ("old", "mine"):
        make_run(name, status="failed")
    Path("runs/old/evaluations.json").touch()  # of a trial
    Path("runs/mine/notes.txt").touch()
    code, out, err = call("runs", "clean", "runs", "--older-than", "0", "--yes")
    assert (code, err) == (0, "runs/mine holds other files, which are kept\n")
    assert out.count("failed run, 0 days old") == 2
    assert not Path("runs/old").exists()
    assert sorted(path.name for path in Path("runs/mine").iterdir()) == [".lock", "notes.txt"]


class Terminal:
    """Standard input that is a terminal with one line."""

    def __init__(self, line: str) -> None:
        self.line = line

    def isatty(self) -> bool:
        return True

    def readline(self, *_: int) -> str:
        return self.line

    def __iter__(self) -> Any:
        return iter([self.line])


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("n\n", False), ("\n", False)], ids=["y", "n", "enter"])
def test_on_a_terminal_the_answer_decides(
    answer: str, removed: bool, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("tickets")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    code, out, _ = call("runs", "clean")
    assert code == 0
    assert out.endswith("removed 5.00 kB\n" if removed else "nothing was removed\n")
    assert (folder / "checkpoints").exists() != removed


def test_a_run_that_is_in_use_is_left_alone(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run("tickets")
    with lock(folder):
        code, out, err = call("runs", "clean", "--yes")
    assert (code, out.splitlines()[-1]) == (0, "removed 0 B")
    assert err.startswith("left alone: runs/tickets is in use by another process")
    assert (folder / "checkpoints").exists()


def test_what_cannot_be_removed_is_listed_and_the_rest_is_removed(
    call: Call, without_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(without_root)
    monkeypatch.setenv("PARTITA_CACHE", str(without_root / "cache"))
    closed, other = make_run("closed") / "checkpoints", make_run("other") / "checkpoints"
    closed.chmod(0o500)
    code, out, err = call("runs", "clean", "--yes")
    closed.chmod(0o700)
    assert (code, out.splitlines()[-1]) == (1, "removed 10.0 kB")
    assert err == (
        "not removed: runs/closed/checkpoints/step-000004: Permission denied\n"
        "error: 1 of 2 places could not be removed completely\n"
    )
    assert (closed / "step-000004").exists()
    assert not other.exists()
