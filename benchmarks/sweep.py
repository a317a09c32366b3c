"""Sweeps: the same trials after kills and for any number of workers, and the cost of the sweep itself."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

import yaml
from harness import ROOT, Limit, Result, Row, main, one_thread

TRIALS, KILLS, WORKERS = 12, 10, 4
MOST_STEPS = 60
"""Maximum number of steps between the start of a command and its kill."""


def config_of(folder: Path, *, epochs: int, **section: Any) -> Path:
    """Write the tickets of an example, and a sweep over them: a small encoder with a head, trained from scratch."""
    place = ROOT / "examples" / "support_tickets" / "make_tickets.py"
    spec = util.spec_from_file_location("make_tickets", place)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(folder)
    config = {
        "base_model": {"type": "scratch", "architecture": "distilbert", "size": "nano", "tokenizer": "word"},
        "input_features": [{"name": "message", "type": "text"}],
        "output_features": [{"name": "team", "type": "category"}],
        "data": {"source": "tickets.csv", "split": {"type": "random", "probabilities": [0.8, 0.1, 0.1]}},
        "trainer": {"type": "finetune", "epochs": epochs, "batch_size": 16, "steps_per_checkpoint": 10},
        "sweep": {
            "trials": TRIALS,
            "parameters": {
                "trainer.learning_rate": {"log_uniform": [1e-4, 1e-1]},
                "trainer.learning_rate_scheduler.decay": ["cosine", "linear", "constant"],
                "trainer.effective_batch_size": [16, 32],
            },
            **section,
        },
    }
    file = folder / "tickets.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf8")
    return file


def command(file: Path, *words: object) -> list[str]:
    return [sys.executable, "-m", "partita", "sweep", str(file), "--quiet", *map(str, words)]


def run(file: Path, *words: object) -> None:
    """Run a sweep to its end."""
    done = subprocess.run(
        command(file, *words), cwd=file.parent, env=one_thread(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)


def trials_of(folder: Path) -> list[Row]:
    """Return everything about the trials of a sweep that does not depend on time, and the losses of all steps."""
    written = json.loads((folder / "sweep.json").read_text("utf8"))
    trials = []
    for one in written["trials"]:
        lines = (folder / one["run"] / "log.jsonl").read_text("utf8").splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        trials.append({key: one[key] for key in one if "seconds" not in key} | {"losses": losses})
    return trials


def best_of(folder: Path) -> int:
    number: int = json.loads((folder / "sweep.json").read_text("utf8"))["best"]["number"]
    return number


def compared(name: str, folder: Path, whole: Path, **more: Any) -> Row:
    """Return a row that compares a sweep with an undisturbed one."""
    pairs = list(zip(trials_of(folder), trials_of(whole), strict=True))
    return {
        "sweep": name,
        **more,
        "trials": len(pairs),
        "other values": sum(one["values"] != other["values"] for one, other in pairs),
        "other results": sum(one != other for one, other in pairs),
        "stopped early": sum(one["state"] == "pruned" for one, _ in pairs),
        "best trial": best_of(folder),
    }


def same(folder: Path, quick: bool) -> Result:
    """Twelve trials chosen by tpe and stopped early by the median, killed ten times, and with four workers.

    A small encoder with a head, trained from scratch on 320 tickets. SIGKILL hits the command at a random step or
    between two; it is repeated with another number of workers, from 1 to 4. Results are the values, the metrics, the
    curve of each trial, what the pruner recorded, and the loss of each step, compared with an undisturbed sweep with
    one worker.
    """
    file = config_of(folder, epochs=2 if quick else 4, pruner={"type": "median", "startup_trials": 3})
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    whole, killed, four = folder / "whole", folder / "killed", folder / "four"
    run(file, "--folder", whole)
    run(file, "--folder", four, "--workers", WORKERS)
    kills = 0
    while kills < (3 if quick else KILLS):
        kills += kill(file, killed, rng)
    run(file, "--folder", killed)
    rows = [
        compared("one worker", whole, whole),
        compared("four workers", four, whole),
        compared("killed", killed, whole, kills=kills, seed=seed),
    ]
    other = sum(row["other results"] + row["other values"] for row in rows)
    bests = len({row["best trial"] for row in rows})
    return rows, [
        Limit("trials that differ", other, 0, "max"),
        Limit("best trials", bests, 1, "max"),
        Limit("kills", kills, 3 if quick else KILLS, "min"),
    ]


def kill(file: Path, folder: Path, rng: random.Random) -> bool:
    """Start a sweep, and kill it at a random step. Return whether it was killed before its end."""
    words = command(file, "--folder", folder, "--workers", rng.randint(1, WORKERS))
    before, wanted = steps_of(folder), rng.randrange(MOST_STEPS)
    process = subprocess.Popen(words, cwd=file.parent, env=one_thread(), stdout=subprocess.DEVNULL)
    while process.poll() is None and steps_of(folder) <= before + wanted:
        time.sleep(0.005)
    time.sleep(rng.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def steps_of(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("trials/*/log.jsonl"))


def cost(folder: Path, quick: bool) -> Result:
    """CPU seconds of a sweep of twelve trials that its trials do not need, in percent of theirs.

    One thread, one worker. `all` are the CPU seconds of all processes; `trials` those that the trials measure of
    themselves, from the fork to the result; `import` those of loading the libraries once, which a single training
    needs as well. Beside it the same twelve trainings, one command each.
    """
    file = config_of(folder, epochs=4 if quick else 16)
    imports = cpu_of(
        [sys.executable, "-c", "from partita.sweeps.trial_server import LIBRARIES, load; load(LIBRARIES)"], folder
    )
    total = cpu_of(command(file, "--folder", folder / "sweep"), folder)
    trials = json.loads((folder / "sweep" / "sweep.json").read_text("utf8"))["trials"]
    own = sum(trial["cpu_seconds"] for trial in trials)
    overhead = 100 * (total - own - imports) / own
    separate = 0.0
    for trial in trials[: 2 if quick else TRIALS]:
        values = [f"--set={key}={value}" for key, value in trial["values"].items()]
        words = [sys.executable, "-m", "partita", "train", str(file), "--quiet", "--set=sweep=null", *values]
        separate += cpu_of([*words, "--run", str(folder / "alone" / str(trial["number"]))], folder)
        shutil.rmtree(folder / "alone")
    separate *= TRIALS / (2 if quick else TRIALS)
    rows: list[Row] = [
        {"run": "sweep", "all CPU s": round(total, 1), "trials": round(own, 1), "import": round(imports, 1)},
        {"run": "twelve commands", "all CPU s": round(separate, 1)},
    ]
    return rows, [
        Limit(
            "CPU seconds of the sweep beyond trials and one import, percent of the trials", round(overhead, 2), 3, "max"
        ),
        Limit("CPU seconds of the sweep over those of twelve commands", round(total / separate, 3), 1, "max"),
    ]


def cpu_of(words: list[str], folder: Path) -> float:
    """Return the CPU seconds of a command and of all processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, cwd=folder, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main(same, cost)
