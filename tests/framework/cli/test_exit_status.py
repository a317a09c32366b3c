"""Tests of the exit status of every command: 2 for user errors, 1 for failed jobs, 130 for interruptions."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from partita.cli.main import app

from ...forks import COMMAND, Forks
from ..report.made_runs import write_run

COMMANDS = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
ROWS = "--dataset rows.csv --quiet"

MISTAKES = {
    "init": "taken",
    "validate": "none.yaml",
    "explain": "none.yaml",
    "preview": "none.yaml",
    "tune": "zero.yaml --dataset none.csv",
    "train": "none.yaml",
    "sweep": "zero.yaml",
    "predict": f"nowhere {ROWS} --output o.csv",
    "evaluate": f"nowhere {ROWS}",
    "simulate": "zero.yaml --quiet",
    "chat": "zero.yaml",
    "serve": "zero.yaml --quiet --context 100000",
    "report": "taken",
    "compare": "done taken",
    "export": "zero.yaml --to merged --output taken --quiet",
    "merge": "nowhere --output merged",
    "push": "nowhere somebody/model",
    "convert": "none.yaml",
    "schema": "--unknown",
    "doctor": "--unknown",
}
"""A user error for each command."""

FAILURES = {
    "init": "fresh --task chat --model scratch --data rows.csv",
    "tune": f"zero.yaml {ROWS} --plot sizes.html",
    "train": "zero.yaml --quiet --run full",
    "sweep": "sweep.yaml --quiet --folder full",
    "predict": f"zero.yaml {ROWS} --output full.csv",
    "report": "done",
    "compare": "done other --html full.html",
    "export": "zero.yaml --to merged --output full-export --quiet",
    "merge": "zero.yaml --output full-merge --quiet",
    "push": "zero.yaml somebody/model --dry-run full-push --quiet",
    "convert": "zero.yaml -o full.yaml",
}
"""Commands that write files, tried on a full disk; the others write none."""

NO_ROOM = (
    "import resource, sys; sys.dont_write_bytecode = True; "  # or truncated files would be imported later
    "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY)); "
)

OPENED = dict.fromkeys(COMMANDS, "zero.yaml") | {
    "init": "run.yaml",
    "report": "manifest.json",
    "compare": "manifest.json",
    "sweep": "sweep.yaml",
}
"""The file at whose opening each command is interrupted."""

INTERRUPTED = {
    "init": "stopped --task chat --model scratch --data rows.csv",
    "validate": "zero.yaml",
    "explain": "zero.yaml",
    "preview": "zero.yaml",
    "tune": "zero.yaml",
    "train": "zero.yaml --run stopped-run",
    "sweep": "sweep.yaml",
    "predict": f"zero.yaml {ROWS} --output o.csv",
    "evaluate": f"zero.yaml {ROWS}",
    "simulate": "zero.yaml",
    "chat": "zero.yaml",
    "serve": "zero.yaml --port 0",
    "report": "done",
    "compare": "done other",
    "export": "zero.yaml --to merged --output stopped-export",
    "merge": "zero.yaml --output stopped-merge",
    "push": "zero.yaml somebody/model --dry-run stopped-push",
    "convert": "zero.yaml",
}

INTERRUPT = """
import os, signal, sys
def interrupt(event, values):
    if event == "open" and str(values[0]).endswith({name!r}):
        os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(interrupt)
"""


@pytest.fixture(scope="module")
def folder(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("statuses")
    zero = colours.config(trainer={"type": "none", "batch_size": 8, "evaluate": ["test"]})
    (place / "zero.yaml").write_text(yaml.safe_dump(zero), encoding="utf8")
    sweep = zero | {"trainer": zero["trainer"] | {"evaluate": ["validation"]}, "sweep": {"parameters": {"seed": [1]}}}
    (place / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf8")
    (place / "taken").mkdir()
    (place / "taken" / "run.yaml").touch()
    write_run(place / "done")
    write_run(place / "other")
    pd.DataFrame(colours.rows(4)).to_csv(place / "rows.csv", index=False)
    return place


Ended = Callable[..., tuple[int, str]]


@pytest.fixture
def ended(forks: Forks, folder: Path) -> Ended:
    """Return exit status and standard error of a command; `before` is run in its process first."""

    def call(command: str, words: str, before: str = "") -> tuple[int, str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        arguments = ("partita", command, *words.split())
        done = forks.run(before + COMMAND, *arguments, folder=folder, environment=environment)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done.returncode, done.stderr

    return call


def test_every_command_is_tested() -> None:
    assert set(MISTAKES) == COMMANDS
    assert set(INTERRUPTED) == COMMANDS - {"schema", "doctor"}, "these commands open no user file"


@pytest.mark.parametrize("command", MISTAKES)
def test_a_user_error_ends_a_command_with_2(command: str, ended: Ended) -> None:
    status, message = ended(command, MISTAKES[command])
    assert status == 2, message
    assert message


@pytest.mark.parametrize("command", FAILURES)
def test_a_failed_job_ends_a_command_with_1(command: str, ended: Ended) -> None:
    status, message = ended(command, FAILURES[command], before=NO_ROOM)
    assert status == 1, message
    assert "File too large" in message


def test_a_prediction_without_any_answer_ends_with_1_and_one_with_some_with_0(ended: Ended, folder: Path) -> None:
    rows = pd.read_csv(folder / "rows.csv")
    long = " ".join(rows.iloc[0, 0] for _ in range(100))
    for name, texts in (("none", [long] * 4), ("one", [long] * 3 + [rows.iloc[3, 0]])):
        rows.assign(**{rows.columns[0]: texts}).to_csv(folder / f"{name}.csv", index=False)
    status, message = ended("predict", "zero.yaml --dataset none.csv --output none-predicted.csv")
    assert status == 1
    assert "without an answer: 4 of 4 rows" in message
    assert len(pd.read_csv(folder / "none-predicted.csv")) == 4
    assert ended("predict", "zero.yaml --dataset none.csv --output none-predicted.csv --quiet --json")[0] == 1
    assert ended("predict", "zero.yaml --dataset one.csv --output one-predicted.csv")[0] == 0


@pytest.mark.parametrize("command", INTERRUPTED)
def test_an_interruption_ends_a_command_with_130(command: str, ended: Ended) -> None:
    status, message = ended(command, INTERRUPTED[command], before=INTERRUPT.format(name=OPENED[command]))
    assert status == 130, message
    resumes = command in ("train", "predict", "simulate", "sweep")
    assert message.endswith(
        "interrupted; rerun the same command to resume from what is saved\n" if resumes else "interrupted\n"
    )


EXIT = """
import atexit, signal, sys
from partita.cli import main

def fail():
    for _ in range(int(sys.argv[1])):
        atexit.register(lambda: signal.raise_signal(signal.SIGTERM))
    raise main.PartitaError("no such row")

main.app = fail
main.run()
"""
"""A command that fails, and gets a number of signals while libraries clean up."""


@pytest.mark.parametrize(("signals", "status"), [(1, 2), (2, -signal.SIGTERM)])
def test_a_signal_at_exit_leaves_status_and_output_as_they_are(signals: int, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, str(signals)], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (status, "error: no such row\n")
