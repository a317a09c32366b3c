"""Tests of killed runs: after a kill at any moment, a resumed run equals an uninterrupted one.

Each attempt runs a command and is killed with SIGKILL at a random line of its log or journal, after a random delay.
"""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from ..forks import COMMAND, Forks
from ..json_lines import log_of, read_json_lines, write_json_lines
from ..seeds import session_seed

pytestmark = pytest.mark.long


class Attempts:
    """Commands, run one after another, that are killed or run to their end."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks, self.folder = forks, folder

    def end(self, *words: object) -> None:
        """Run a command to its end and check that it succeeds."""
        done = self.forks.run(COMMAND, "partita", *words, "--quiet", folder=self.folder)
        assert done.returncode == 0, done.stderr

    def kill(
        self,
        *words: object,
        watched: Path,
        lines: int,
        delay: float,
        has_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start a command, and kill it `delay` seconds after it has started and the watched file has `lines` lines."""
        program = self.forks.start(COMMAND, "partita", *words, "--quiet", folder=self.folder)
        while not (has_started() and watched.exists() and watched.read_bytes().count(b"\n") >= lines):
            assert program.poll() is None, program.communicate()
            time.sleep(0.001)
        time.sleep(delay)
        program.send_signal(signal.SIGKILL)
        program.communicate()


def train_killed_and_straight(
    forks: Forks, folder: Path, settings: dict[str, Any], *, steps: int
) -> tuple[Path, Path, int]:
    """Return a run killed three times, an uninterrupted run, and the seed of the kills."""
    seed = session_seed()
    rng = random.Random(seed)
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    killed, straight = folder / "killed", folder / "straight"
    attempts = Attempts(forks, folder)
    for earlier, lines in enumerate(sorted(rng.sample(range(1, steps + 1), 3))):
        delay = rng.uniform(0, 0.03)
        attempts.kill(
            *("train", "run.yaml", "--run", killed),
            watched=killed / "log.jsonl",
            lines=lines,
            delay=delay,
            # An earlier attempt may have written these lines already, before it was killed.
            has_started=lambda earlier=earlier: starts_of(killed) > earlier,  # type: ignore[misc]
        )
    for run in (killed, straight):
        attempts.end("train", "run.yaml", "--run", run)
    return killed, straight, seed


def starts_of(run: Path) -> int:
    """Return how often a run was started according to its manifest."""
    manifest = run / "manifest.json"
    starts: int = json.loads(manifest.read_text(encoding="utf8"))["starts"] if manifest.exists() else 0
    return starts


def check_equal(killed: Path, straight: Path, *, weights: str, seed: int, starts: int) -> None:
    """Check that log, weights, metrics and counts are equal; weights bit for bit."""
    assert log_of(killed) == log_of(straight), f"seed {seed}"
    one, other = (load_file(run / "model" / weights) for run in (killed, straight))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one), f"seed {seed}"
    manifests = [json.loads((run / "manifest.json").read_text(encoding="utf8")) for run in (killed, straight)]
    assert manifests[0]["starts"] == starts, f"seed {seed}"
    kept = ("status", "steps", "metrics", "evaluations", "best", "best_step", "labels", "data", "ledger")
    assert [manifests[0][key] for key in kept] == [manifests[1][key] for key in kept], f"seed {seed}"
    sums = [[manifest["batches"][name] for name in ("rows", "tokens", "loss_tokens")] for manifest in manifests]
    assert sums[0] == sums[1], f"seed {seed}"


SHORT = {"epochs": 2, "batch_size": 8, "steps_per_checkpoint": 3, "steps_per_evaluation": 10, "max_generated_rows": 4}
"""Two epochs, with checkpoints and evaluations at different steps."""


def test_training_killed_three_times_equals_the_straight_run(forks: Forks, colours: Any, tmp_path: Path) -> None:
    settings = colours.config(
        base_model={"architecture": "gpt2"},
        model_parameters={"neftune_noise_alpha": 5},
        preprocessing={"sample_size": 300},
        trainer={**SHORT, "evaluate_generated": True, "effective_batch_size": 16},
    )
    killed, straight, seed = train_killed_and_straight(forks, tmp_path, settings, steps=30)
    check_equal(killed, straight, weights="model.safetensors", seed=seed, starts=4)
    log = log_of(straight)
    assert len({line["batch_hash"] for line in log}) == len(log) == 30
    assert log[-1]["loss"] < log[0]["loss"]


def test_lora_with_dropout_and_workers_killed_three_times_equals_the_straight_run(
    forks: Forks, colours: Any, tmp_path: Path
) -> None:
    settings = colours.config(
        adapter={"type": "lora", "r": 4, "dropout": 0.1},
        preprocessing={"sample_size": 240},
        data={"loader": {"workers": 2}},
        trainer={**SHORT, "effective_batch_size": 8, "evaluate_generated": False},
    )
    killed, straight, seed = train_killed_and_straight(forks, tmp_path, settings, steps=48)
    check_equal(killed, straight, weights="adapter_model.safetensors", seed=seed, starts=4)
    assert len(log_of(straight)) == 48


def test_sigterm_saves_the_step_exits_with_130_and_continues_exactly(
    forks: Forks, colours: Any, tmp_path: Path
) -> None:
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
    process = forks.start(COMMAND, "partita", "train", "run.yaml", "--run", stopped, folder=tmp_path)
    log = stopped / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "stopping after this step\n" in stderr
    assert stderr.endswith("interrupted; rerun the same command to resume from what is saved\n")
    assert "Traceback" not in stderr
    step = len(log_of(stopped))
    manifest = json.loads((stopped / "manifest.json").read_text(encoding="utf8"))
    assert manifest["status"] == "interrupted"
    # A checkpoint of this step is written although none was due: no work is repeated.
    assert (stopped / "checkpoints" / f"step-{step:06}").is_dir()

    for run in (stopped, straight):
        Attempts(forks, tmp_path).end("train", "run.yaml", "--run", run)
    check_equal(stopped, straight, weights="adapter_model.safetensors", seed=0, starts=2)


def test_prediction_killed_three_times_equals_the_straight_one(forks: Forks, colours: Any, tmp_path: Path) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    settings = colours.config(
        trainer={"type": "none", "batch_size": 8}, generation={"do_sample": True, "temperature": 1.5, "top_p": 0.95}
    )
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    rows = colours.rows(400, seed=11)
    rows[7]["text"] = ""
    write_json_lines(tmp_path / "asked.jsonl", rows)
    words = ("predict", "zero.yaml", "--dataset", "asked.jsonl", "--output")
    attempts = Attempts(forks, tmp_path)
    # The name of the journal includes the path of the output, and is known after the start of the first attempt.
    from partita.data.rows import digest

    output = tmp_path / "killed.jsonl"
    journal = tmp_path / "runs" / "zero" / "journal" / f"killed-{digest(str(output.resolve()))[:12]}.jsonl"
    for lines in sorted(rng.sample(range(1, 390), 3)):
        attempts.kill(*words, output.name, watched=journal, lines=lines, delay=rng.uniform(0, 0.01))
    for name in (output.name, "straight.jsonl"):
        attempts.end(*words, name)
    assert output.read_bytes() == (tmp_path / "straight.jsonl").read_bytes(), f"seed {seed}"
    result = read_json_lines(output)
    assert [row["text"] for row in result] == [row["text"] for row in rows]
    assert [place for place, row in enumerate(result) if row["status"] != "ok"] == [7]
    assert len({row["colour_raw"] for row in result}) > 300, "sampled answers differ"


def test_best_of_killed_three_times_equals_the_straight_one_and_chooses_no_row_twice(
    forks: Forks, colours: Any, tmp_path: Path
) -> None:
    from partita import Model
    from partita.data.rows import digest

    seed = session_seed()
    rng = random.Random(seed)
    rows = colours.rows(120, seed=11)
    write_json_lines(tmp_path / "asked.jsonl", [{"text": row["text"]} for row in rows])
    pairs = [{"text": row["text"], "chosen": row["colour"], "rejected": "none"} for row in rows]
    write_json_lines(tmp_path / "pairs.jsonl", pairs)
    reward = colours.config(
        output_features=[{"name": "answer", "type": "preference"}],
        trainer={"type": "reward", "max_steps": 2, "batch_size": 8, "eval_batch_size": 8},
    )
    reward["data"] = {"source": str(tmp_path / "pairs.jsonl")}
    del reward["generation"]
    Model(reward, quiet=True).train(run=tmp_path / "rm")
    settings = colours.config(
        output_features=[{"name": "colour", "type": "text"}],
        trainer={"type": "none", "batch_size": 16},
        generation={"do_sample": True, "temperature": 1.5, "max_new_tokens": 8, "best_of": 4, "reward": "rm"},
    )
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    words = ("predict", "zero.yaml", "--dataset", "asked.jsonl", "--output")
    attempts, output = Attempts(forks, tmp_path), tmp_path / "killed.jsonl"
    journal = tmp_path / "runs" / "zero" / "journal" / f"killed-{digest(str(output.resolve()))[:12]}.jsonl"
    for lines in sorted(rng.sample(range(2, 115), 3)):
        attempts.kill(*words, output.name, watched=journal, lines=lines, delay=rng.uniform(0, 0.01))
    for name in (output.name, "straight.jsonl"):
        attempts.end(*words, name)

    assert output.read_bytes() == (tmp_path / "straight.jsonl").read_bytes(), f"seed {seed}"
    records = [json.loads(line) for line in journal.read_text("utf8").splitlines()[1:]]
    assert sorted(record["row"] for record in records) == list(range(120)), f"seed {seed}"
    assert len({row["reward"] for row in read_json_lines(output)}) > 60


def test_training_on_a_stream_killed_three_times_equals_the_straight_run(
    forks: Forks, colours: Any, tmp_path: Path
) -> None:
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
    killed, straight, seed = train_killed_and_straight(forks, tmp_path, settings, steps=30)
    check_equal(killed, straight, weights="model.safetensors", seed=seed, starts=4)
    ledgers = [json.loads((run / "ledger.json").read_text(encoding="utf8")) for run in (killed, straight)]
    assert ledgers[0] == ledgers[1]
    assert ledgers[0]["splits"]["training"]["left_out"] == 2
    assert len((killed / "quarantine.jsonl").read_text(encoding="utf8").splitlines()) == 2
