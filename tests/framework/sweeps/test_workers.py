"""Tests of the process that starts the trials of a sweep: it imports what the caller would import."""

from pathlib import Path
from typing import Any

import pytest

from partita import Sweep
from partita.sweeps.workers import LocalWorkers, closing

SERVER = """
from multiprocessing.connection import Connection

def main(arguments):
    Connection(int(arguments[0])).send("of the caller")
"""
CALLBACK = """
class Stops:
    def on_step(self, state):
        state.stop("at once")
"""


def test_modules_are_those_of_the_caller_and_not_those_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, code in (("modules", SERVER), ("project", "raise ImportError")):
        package = tmp_path / folder / "partita" / "sweeps"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "trial_server.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path / "project")
    with Path("lock").open("w") as lock, closing(LocalWorkers(count=1, lock=lock.fileno())) as workers:
        assert workers.connection.recv() == "of the caller"


@pytest.mark.long
def test_trials_import_from_the_path_of_the_caller_and_not_from_the_current_folder(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("modules", "project"):
        (tmp_path / folder).mkdir()
    for name in ("random", "accelerate"):
        (tmp_path / "project" / f"{name}.py").write_text("raise ImportError('a file of the user')")
    (tmp_path / "modules" / "stopping.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.chdir(tmp_path / "project")
    config = colours.config(
        trainer={"epochs": 1, "evaluate_generated": False, "evaluate_test": False},
        sweep={"sampler": "grid", "parameters": {"trainer.learning_rate": [0.01]}},
    )
    config["callbacks"] = [{"type": "custom", "target": "stopping:Stops"}]
    (trial,) = Sweep(config, quiet=True).run(colours.rows(32)).trials
    assert trial.result is not None
    assert (trial.result.state, trial.result.error) == ("done", None)
