"""Small sweeps with real trials."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from ...forks import ENVIRONMENT

COMMAND = [sys.executable, "-m", "partita", "sweep"]


def write_file(colours: Any, folder: Path, *, steps_per_checkpoint: int = 4, **section: Any) -> Path:
    """Write a file with a sweep of 6 trials, each of 8 to 32 steps, and return its path."""
    parameters = {"trainer.learning_rate": {"log_uniform": [1e-4, 1e-1]}, "trainer.batch_size": [8, 16, 32]}
    trainer = {"epochs": 2, "evaluations_per_epoch": 2, "evaluate_generated": False, "evaluate_test": False}
    config = colours.config(
        trainer={**trainer, "steps_per_checkpoint": steps_per_checkpoint},
        preprocessing={"sample_size": 160},
        sweep={"parameters": parameters, "trials": 6, "max_concurrent_trials": 2, **section},
    )
    file = folder / "colours.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def sweep(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENVIRONMENT
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def trials_of(folder: Path) -> list[Any]:
    """Return everything about the trials of a sweep that does not depend on time."""
    written = json.loads((folder / "sweep.json").read_text())
    return [{key: one[key] for key in one if "seconds" not in key} for one in written["trials"]]


def steps_of(folder: Path, count: int) -> bool:
    """Return whether a trial that runs has taken this many steps."""
    running = [path for path in folder.glob("trials/*/log.jsonl") if not path.with_name("trial.json").exists()]
    return any(path.read_bytes().count(b"\n") > count for path in running)
