"""Tests of the log as JSON lines."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.cli.main import fail
from partita.runs import progress
from partita.runs.json_log import is_json, log_as_json
from partita.runs.log import show_log
from partita.runs.progress import show_progress
from partita.runs.waiting import WAITS, waiting

from ...forks import COMMAND

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "command-line.md"
COMMON = {"time", "level", "event", "message"}


@pytest.fixture(autouse=True)
def text_again() -> Iterator[None]:
    yield
    progress.ELSEWHERE.clear()
    WAITS.shown = False


def events(text: str) -> list[dict[str, Any]]:
    """Return the events without their times, whose format is checked."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    return lines


def test_log_progress_and_errors_are_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json()
    show_log(quiet=False)
    with waiting("loading libraries"):
        logging.getLogger("partita.x").info("%d rows", 16)
    with show_progress(2, "training") as bar:
        bar.advance(2, loss=0.5)
    logging.getLogger("partita.x").warning("slow", extra={"fields": {"event": "own", "value": float("nan")}})
    fail("no", code=2, label="error: ")
    log, shown, own, error = events(capsys.readouterr().err)
    assert log == {"level": "info", "event": "log", "message": "16 rows"}
    assert shown.pop("elapsed_seconds") >= 0
    assert shown == {
        "level": "info",
        "event": "progress",
        "message": "training 2/2",
        "task": "training",
        "done": 2,
        "total": 2,
        "values": {"loss": 0.5},
    }
    assert own == {"level": "warning", "event": "own", "message": "slow", "value": None}
    assert error == {"level": "error", "event": "error", "message": "no", "status": 2}


def test_quiet_leaves_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json()
    show_log(quiet=True)
    logging.getLogger("partita.x").info("hidden")
    with show_progress(2, "training", quiet=True) as bar:
        bar.advance(2)
    logging.getLogger("partita.x").warning("shown")
    assert [event["message"] for event in events(capsys.readouterr().err)] == ["shown"]


def test_text_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_json()
    fail("no", code=2, label="error: ")
    assert capsys.readouterr().err == "error: no\n"


def documented() -> dict[str, set[str]]:
    """Return the keys of each event in the guide."""
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", GUIDE.read_text("utf8").partition("| event |")[2], re.MULTILINE)
    return {event: set(re.findall(r"`(\w+)`", keys)) for event, keys in rows[:7]}


@pytest.mark.long
def test_a_command_writes_the_documented_keys(forks: Any, tmp_path: Path, colours: Any) -> None:
    config = colours.config(trainer={"max_steps": 4, "steps_per_evaluation": 2, "evaluate_generated": False})
    (tmp_path / "run.yaml").write_text(json.dumps(config), encoding="utf8")
    trained = forks.run(COMMAND, "partita", "train", "run.yaml", "--run", "run", "--log-json", folder=tmp_path)
    wrong = forks.run(COMMAND, "partita", "train", "none.yaml", "--log-json", folder=tmp_path)
    lines = [json.loads(line) for line in (trained.stderr + wrong.stderr).splitlines()]
    keys = documented()
    assert {line["event"] for line in lines} == keys.keys() - {"sweep", "trial"}
    for line in lines:
        assert set(line) - COMMON == keys[line["event"]], line["event"]
    assert [line["event"] for line in lines[:1]] == ["run"]
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [2, 4]


@pytest.mark.long
def test_a_sweep_writes_the_documented_keys(forks: Any, tmp_path: Path, colours: Any) -> None:
    config = colours.config(trainer={"max_steps": 2, "evaluate_generated": False, "evaluate_test": False})
    config["sweep"] = {"parameters": {"trainer.learning_rate": [0.01, 0.02]}, "sampler": "grid"}
    (tmp_path / "run.yaml").write_text(json.dumps(config), encoding="utf8")
    words = ["partita", "sweep", "run.yaml", "--log-json"]
    first, again = (forks.run(COMMAND, *words, folder=tmp_path) for _ in range(2))
    lines, repeated = ([json.loads(line) for line in one.stderr.splitlines()] for one in (first, again))
    assert [line["event"] for line in lines] == ["sweep", "trial", "trial", "log"]
    keys = documented()
    for line in lines:
        assert set(line) - COMMON == keys[line["event"]], line["event"]
    assert (lines[0]["start"], lines[0]["trials"], lines[0]["ended"]) == ("new", 2, 0)
    assert [(line["trial"], line["state"], line["values"], line["ended"]) for line in lines[1:3]] == [
        (0, "done", {"trainer.learning_rate": 0.01}, 1),
        (1, "done", {"trainer.learning_rate": 0.02}, 2),
    ]
    assert lines[0]["message"] == "sweep folder: sweeps/run (2 trials, new)"
    assert repeated[0]["message"] == "sweep folder: sweeps/run (2 trials, finished)"
