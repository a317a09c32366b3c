"""Tests of sweeps with real processes: kills, workers, interruptions, failures, and the command line."""

import json
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model
from partita.runs.manifest import read_manifest
from partita.runs.sweep_record import read_result

from ... import self_training
from ...forks import COMMAND, Fork, Forks
from ...json_lines import log_of
from ...seeds import session_seed
from .small_sweeps import steps_of, trials_of, write_file

pytestmark = pytest.mark.long

ADAPTER = "adapter={type: lora}"
LONG = "trainer.epochs=10000"
"""No trial ends before the test interrupts it."""


class Sweeps:
    """Starts `partita sweep` in a folder, as forks of a process that has imported the libraries."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.folder = forks, folder

    def start(self, *words: object) -> Fork:
        return self.forks.start(COMMAND, "partita", "sweep", *words, folder=self.folder)

    def run(self, *words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        settings = self.forks.environment | environment
        return self.forks.run(
            COMMAND, "partita", "sweep", *words, folder=self.folder, environment=settings, timeout=280
        )


@pytest.fixture
def sweeps(forks: Forks, tmp_path: Path) -> Sweeps:
    return Sweeps(forks, tmp_path)


def test_a_killed_sweep_and_one_with_more_workers_have_the_same_trials(
    colours: Any, sweeps: Sweeps, tmp_path: Path
) -> None:
    file = write_file(colours, tmp_path, pruner={"type": "median", "startup_trials": 2})
    done = sweeps.run(file)
    assert done.returncode == 0, done.stderr
    assert "best: trial " in done.stdout
    assert " --dataset ROWS --output FILE" in " ".join(done.stdout.split())
    whole = trials_of(tmp_path / "sweeps" / "colours")
    assert {one["state"] for one in whole} == {"done", "pruned"}
    rng = random.Random(session_seed())
    killed = tmp_path / "killed"
    for attempt in range(3):
        program = sweeps.start(file, "--folder", killed, "--workers", 1 + attempt % 2, "--quiet")
        ended, logged = len(list(killed.glob("trials/*/trial.json"))), rng.randrange(8)
        while len(list(killed.glob("trials/*/trial.json"))) <= ended and not steps_of(killed, logged):
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait()
    done = sweeps.run(file, "--folder", killed, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert trials_of(killed) == whole
    for one in whole:
        logs = [log_of(place / one["run"]) for place in (killed, tmp_path / "sweeps" / "colours")]
        assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]


def test_the_learning_curve_of_a_trial_with_self_training_is_that_of_its_training_on_data(
    sweeps: Sweeps, tmp_path: Path
) -> None:
    scratch = {"type": "scratch", "size": "nano", "tokenizer": "byte"}
    trainer = {"max_steps": 8, "batch_size": 8, "steps_per_evaluation": 4}
    rounds = {"tasks": {"count": 20}, "select": "all", "guard": None}
    file = self_training.settings(base_model=scratch, generation={}, trainer=trainer, **rounds)
    file["sweep"] = {"parameters": {"seed": [1]}, "trials": 1}
    self_training.fill(tmp_path)
    (tmp_path / "words.yaml").write_text(yaml.safe_dump(file))
    done = sweeps.run("words.yaml")
    assert done.returncode == 0, done.stderr

    (trial,) = trials_of(tmp_path / "sweeps" / "words")
    assert [(one["step"], one["share"]) for one in trial["curve"]] == [(4, 0.5), (8, 1.0)]
    run = tmp_path / "sweeps" / "words" / trial["run"]
    metrics = [read_manifest(run / part)["metrics"]["validation"]["loss"] for part in ("", "rounds/2")]
    assert metrics == [trial["value"]] * 2
    assert trial["curve"][-1]["value"] != trial["value"]


def test_a_trial_is_the_run_that_train_makes_with_its_values(colours: Any, sweeps: Sweeps, tmp_path: Path) -> None:
    file = write_file(colours, tmp_path, trials=2)
    done = sweeps.run(file, "--json", "--set", ADAPTER, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    run = tmp_path / "sweeps" / "colours" / best["run"]
    overrides = ["sweep=null", ADAPTER, *(f"{key}={value}" for key, value in best["values"].items())]
    Model(file, overrides=overrides, quiet=True).train(run=tmp_path / "run")
    assert [line["loss"] for line in log_of(run)] == [line["loss"] for line in log_of(tmp_path / "run")]
    assert len(Model.load(run, quiet=True).predict(colours.rows(3))) == 3
    assert shlex.split(read_manifest(run)["command"])[:4] == ["partita", "sweep", str(file), "--json"]
    result = read_result(run)
    assert result is not None
    assert result.curve[-1].share == 1
    log = (run / "trial.log").read_text(encoding="utf8")
    imported = {line.split("|")[-1].strip() for line in log.splitlines() if "|" in line}
    assert "partita.report.run_page" in imported, "the log has no imports"
    large = {"torch", "transformers", "peft", "accelerate"}
    assert not imported & large, "the process that starts the trials has imported these"


def test_documents_with_other_tokenizers_are_compared_by_their_bits_per_byte(sweeps: Sweeps, tmp_path: Path) -> None:
    texts = [f"{number} {['red', 'green', 'blue'][number % 3]} stones lie there" for number in range(64)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    config = {
        "base_model": {"type": "scratch", "size": "nano"},
        "output_features": [{"name": "text", "type": "text"}],
        "data": {"source": "texts.jsonl"},
        "trainer": {"type": "finetune", "epochs": 1, "batch_size": 8, "evaluate_test": False},
        "sweep": {"sampler": "grid", "parameters": {"base_model.tokenizer": ["byte", "word"]}},
    }
    file = tmp_path / "texts.yaml"
    file.write_text(yaml.safe_dump(config))
    refused = sweeps.run(file)
    assert refused.returncode == 2
    assert "such as metric: bits_per_byte, or metric: loss to compare them all the same" in refused.stderr
    done = sweeps.run(file, "--json", "--set", "sweep.metric=bits_per_byte", "--set", "sweep.pruner={type: median}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["mode"] == "minimize"
    for trial in result["trials"]:
        assert trial["value"] == trial["metrics"]["bits_per_byte"] == trial["curve"][-1]["value"]


def test_an_interrupted_sweep_ends_with_130_and_leaves_no_process(colours: Any, sweeps: Sweeps, tmp_path: Path) -> None:
    file = write_file(colours, tmp_path)
    program = sweeps.start(file, "--workers", "2", "--set", LONG)
    while not steps_of(tmp_path / "sweeps" / "colours", 2):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=100)
    assert program.returncode == 130
    assert said.endswith("interrupted; rerun the same command to resume from what is saved\n")
    left = subprocess.run(["pgrep", "-f", "trial_server"], capture_output=True, text=True, check=False).stdout.split()
    assert not [pid for pid in left if works_in(pid, tmp_path)]
    running = list(tmp_path.glob("sweeps/colours/trials/*/manifest.json"))
    assert "interrupted" in {json.loads(path.read_text())["status"] for path in running}


def test_trials_that_have_just_been_started_are_interrupted(colours: Any, sweeps: Sweeps, tmp_path: Path) -> None:
    file = write_file(colours, tmp_path)
    program = sweeps.start(file, "--workers", "2", "--set", LONG)
    while not (tmp_path / "sweeps" / "colours" / "sweep.json").exists():
        assert program.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)  # the orders are sent while the process that takes them loads the libraries
    program.send_signal(signal.SIGINT)
    assert program.wait(timeout=100) == 130
    assert not list(tmp_path.glob("sweeps/colours/trials/*/trial.json"))


def works_in(pid: str, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()
    except OSError:
        return False


def test_a_sweep_whose_trials_all_fail_ends_with_1_and_the_reason(colours: Any, sweeps: Sweeps, tmp_path: Path) -> None:
    file = write_file(colours, tmp_path, trials=2)
    done = sweeps.run(file, "--set", "base_model=missing")
    assert done.returncode == 1
    assert "error: none of 2 trials has a result; trial 0: " in done.stderr
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_whose_rows_have_changed_is_refused_and_continues_with_the_old_rows(
    colours: Any, sweeps: Sweeps, tmp_path: Path
) -> None:
    file = write_file(colours, tmp_path, trials=1)
    config, rows = yaml.safe_load(file.read_text()), tmp_path / "rows.jsonl"
    config["data"]["source"] = str(rows)
    file.write_text(yaml.safe_dump(config))
    written = "".join(f"{json.dumps(row)}\n" for row in colours.rows(160))
    rows.write_text(written)
    program = sweeps.start(file, "--quiet")
    folder = tmp_path / "sweeps" / "colours"
    while not list(folder.glob("trials/*/checkpoints/step-*/*")):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGKILL)
    program.wait()

    rows.write_text(written.replace("red", "rot"))
    refused = sweeps.run(file)
    assert refused.returncode == 2
    assert "error: the training rows have changed since sweeps/colours/trials/000-" in refused.stderr
    assert " was trained: 128 rows then, 128 rows now with other content; restore them, or " in refused.stderr
    assert not list(folder.glob("trials/*/trial.json"))

    rows.write_text(written)
    assert sweeps.run(file).returncode == 0


def test_train_refuses_a_file_with_a_sweep(colours: Any, sweeps: Sweeps, tmp_path: Path) -> None:
    file = write_file(colours, tmp_path)
    done = sweeps.forks.run(COMMAND, "partita", "train", file, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"{file}: sweep: describes several runs, and this is a verb for one; run partita sweep FILE, name the run "
        "directory of a trial instead of the file, or ignore the section with --set sweep=null\n"
    )
