"""Whatever moment a run is killed at: started again, it ends as one that was never stopped.

One process imports the libraries once. Each attempt is a fork of it that trains or predicts as the command line does,
and is killed without warning when it has come to a random place; the moment inside of a step is random as well.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.faults

PARTITA = [sys.executable, "-m", "partita"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import bitsandbytes, datasets, peft, transformers
from partita.cli.main import run
import partita.model, partita_trainers.finetune

def attempt(words, watched, size, delay):
    pid = os.fork()
    if not pid:
        sys.argv = ["partita", *words, "--quiet"]
        try:
            run()
        finally:
            os._exit(0 if sys.exc_info()[1] is None or not sys.exc_info()[1].code else 1)
    killed = False
    while not killed:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return print("ended", status, flush=True)
        if size >= 0 and watched.exists() and watched.read_bytes().count(b"\\n") >= size:
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed = True
        time.sleep(0.001)
    print("killed", watched.read_bytes().count(b"\\n"), flush=True)

for line in sys.stdin:
    watched, size, delay, *words = line.rstrip("\\n").split("\\t")
    attempt(words, Path(watched), int(size), float(delay))
"""


class Attempts:
    """Commands in forks of one process; those with a size are killed when the watched file has as many lines."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self.folder = folder

    def add(self, *words: object, watched: Path, lines: int = -1, delay: float = 0.0) -> None:
        """One more; without `lines` it goes on to its end."""
        self.lines.append("\t".join(map(str, (watched, lines, delay, *words))) + "\n")

    def run(self) -> list[tuple[str, int]]:
        """How each ended: ("killed", lines of the watched file) or ("ended", exit status)."""
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input="".join(self.lines),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=ENVIRONMENT,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        ends = [line.split() for line in done.stdout.splitlines() if line.startswith(("killed ", "ended "))]
        assert len(ends) == len(self.lines), done.stdout + done.stderr
        assert all(end != ["ended", "256"] for end in ends), done.stderr
        return [(kind, int(number)) for kind, number in ends]


def train_killed_and_straight(folder: Path, settings: dict[str, Any], *, steps: int) -> tuple[Path, Path, int]:
    """Both runs of a configuration, one killed three times; and the seed that the moments were drawn with."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    killed, straight = folder / "killed", folder / "straight"
    attempts = Attempts(folder)
    for lines in sorted(chance.sample(range(1, steps + 1), 3)):
        delay = chance.uniform(0, 0.03)
        attempts.add("train", "run.yaml", "--run", killed, watched=killed / "log.jsonl", lines=lines, delay=delay)
    for run in (killed, straight):
        attempts.add("train", "run.yaml", "--run", run, watched=run / "log.jsonl")
    ends = attempts.run()
    assert [kind for kind, _ in ends] == ["killed", "killed", "killed", "ended", "ended"], f"seed {seed}: {ends}"
    return killed, straight, seed


def without_times(run: Path) -> list[dict[str, Any]]:
    """log.jsonl without the only thing in it that time decides."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf8").splitlines()]
    assert all(line.pop("seconds") > 0 for line in lines)
    return lines


def check_equal(killed: Path, straight: Path, *, weights: str, seed: int, starts: int) -> None:
    """Log, weights, metrics and counts are the same; weights bit for bit."""
    assert without_times(killed) == without_times(straight), f"seed {seed}"
    one, other = (load_file(run / "model" / weights) for run in (killed, straight))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one), f"seed {seed}"
    manifests = [json.loads((run / "manifest.json").read_text(encoding="utf8")) for run in (killed, straight)]
    assert manifests[0]["starts"] == starts, f"seed {seed}"
    kept = ("status", "steps", "metrics", "evaluations", "best", "best_step", "labels", "data", "ledger")
    assert [manifests[0][key] for key in kept] == [manifests[1][key] for key in kept], f"seed {seed}"


SHORT = {"epochs": 2, "batch_size": 8, "steps_per_checkpoint": 3, "steps_per_evaluation": 10, "max_generated_rows": 4}
"""Two epochs, with checkpoints and evaluations that do not fall together."""


def test_training_killed_three_times_equals_the_straight_run(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(
        base_model={"architecture": "gpt2"},
        model_parameters={"neftune_noise_alpha": 5},
        preprocessing={"sample_size": 300},
        trainer={**SHORT, "evaluate_generated": True, "effective_batch_size": 16},
    )
    killed, straight, seed = train_killed_and_straight(tmp_path, settings, steps=30)
    check_equal(killed, straight, weights="model.safetensors", seed=seed, starts=4)
    log = without_times(straight)
    assert len({line["batch_hash"] for line in log}) == len(log) == 30
    assert log[-1]["loss"] < log[0]["loss"]


def test_lora_with_dropout_and_workers_killed_three_times_equals_the_straight_run(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(
        adapter={"type": "lora", "r": 4, "dropout": 0.1},
        preprocessing={"sample_size": 240},
        data={"loader": {"workers": 2}},
        trainer={**SHORT, "effective_batch_size": 8, "evaluate_generated": False},
    )
    killed, straight, seed = train_killed_and_straight(tmp_path, settings, steps=48)
    check_equal(killed, straight, weights="adapter_model.safetensors", seed=seed, starts=4)
    assert len(without_times(straight)) == 48


def test_sigterm_saves_the_step_exits_with_130_and_goes_on_exactly(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(
        adapter={"type": "lora", "r": 4, "dropout": 0.1},
        trainer={
            **SHORT,
            "epochs": 3,
            "effective_batch_size": 8,
            "evaluate_generated": False,
            "steps_per_checkpoint": 90,
        },
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    command = [*PARTITA, "train", "run.yaml", "--run", str(stopped)]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    log = stopped / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "stopping after this step; once more to stop at once" in told
    assert told.endswith("interrupted; what was done is kept, start the same command again to go on\n")
    assert "Traceback" not in told
    step = len(without_times(stopped))
    manifest = json.loads((stopped / "manifest.json").read_text(encoding="utf8"))
    assert manifest["status"] == "interrupted"
    # A checkpoint of this very step, although none was due: nothing that was done is done again.
    assert (stopped / "checkpoints" / f"step-{step:06}").is_dir()

    attempts = Attempts(tmp_path)
    for run in (stopped, straight):
        attempts.add("train", "run.yaml", "--run", run, watched=run / "log.jsonl")
    assert [kind for kind, _ in attempts.run()] == ["ended", "ended"]
    check_equal(stopped, straight, weights="adapter_model.safetensors", seed=0, starts=2)


def test_prediction_killed_three_times_equals_the_straight_one(colours: Any, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    settings = colours.config(
        trainer={"type": "none", "batch_size": 8}, generation={"do_sample": True, "temperature": 1.5, "top_p": 0.95}
    )
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    rows = colours.rows(400, seed=11)
    rows[7]["text"] = ""
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    words = ("predict", "zero.yaml", "--dataset", "asked.jsonl", "--output")
    attempts = Attempts(tmp_path)
    # The journal's name holds its output's whole path, and is known once the first attempt has begun.
    from partita.data.rows import digest

    output = tmp_path / "killed.jsonl"
    journal = tmp_path / "runs" / "zero" / "journal" / f"killed-{digest(str(output.resolve()))[:12]}.jsonl"
    for lines in sorted(chance.sample(range(1, 390), 3)):
        attempts.add(*words, output.name, watched=journal, lines=lines, delay=chance.uniform(0, 0.01))
    attempts.add(*words, output.name, watched=journal)
    attempts.add(*words, "straight.jsonl", watched=journal)
    ends = attempts.run()
    assert [kind for kind, _ in ends] == ["killed", "killed", "killed", "ended", "ended"], f"seed {seed}: {ends}"
    assert output.read_bytes() == (tmp_path / "straight.jsonl").read_bytes(), f"seed {seed}"
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert [place for place, row in enumerate(found) if row["status"] != "ok"] == [7]
    assert len({row["colour_raw"] for row in found}) > 300, "sampled answers differ"


def test_training_on_a_stream_killed_three_times_equals_the_straight_run(colours: Any, tmp_path: Path) -> None:
    rows = [json.dumps(row) for row in colours.rows(200)]
    rows[50:50] = ["{ broken", "[]"]
    for shard in range(3):
        (tmp_path / f"part-{shard}.jsonl").write_text("".join(f"{row}\n" for row in rows[shard::3]), encoding="utf8")
    outputs = [{"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}}]
    settings = colours.config(
        output_features=outputs,
        trainer={**SHORT, "epochs": None, "max_steps": 30, "effective_batch_size": 16},
    )
    settings["data"] = {
        "source": {"type": "jsonl", "path": str(tmp_path / "part-*.jsonl"), "streaming": True},
        "validation": str(colours.path / "rows.jsonl"),
        "batching": {"type": "token_budget", "max_tokens": 150, "window": 24},
        "loader": {"workers": 2},
        "max_bad_rows": 2,
    }
    del settings["trainer"]["batch_size"]
    killed, straight, seed = train_killed_and_straight(tmp_path, settings, steps=30)
    check_equal(killed, straight, weights="model.safetensors", seed=seed, starts=4)
    ledgers = [json.loads((run / "ledger.json").read_text(encoding="utf8")) for run in (killed, straight)]
    assert ledgers[0] == ledgers[1]
    assert ledgers[0]["splits"]["training"]["left_out"] == 2
    assert len((killed / "quarantine.jsonl").read_text(encoding="utf8").splitlines()) == 2
