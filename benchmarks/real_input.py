"""Real material end to end: a pretrained model is asked, learns problems, answers unseen ones, and is killed meanwhile.

Needs the shared folder beside the checkout. Everything goes through the `partita` command with one thread: zero-shot on
stories260k; LoRA on the first 2,000 rows of gsm8k for one epoch (512 tokens, r 16); held-out loss of 200 further rows
before and after; predictions of 500 further rows. Training and prediction run twice: once straight through, and once
killed with SIGKILL at three random moments each and started again. The differences between both are counted.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from harness import SHARED, Limit, parse_arguments, report
from safetensors.torch import load_file

STORIES = SHARED / "models" / "stories260k"
PROBLEMS = SHARED / "data" / "gsm8k" / "train.jsonl"
CONTINUATION = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."
)
PARTITA = [sys.executable, "-m", "partita"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
KILLS = 3


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    if not SHARED.is_dir():
        sys.exit(f"needs the shared folder at {SHARED}")
    sizes = (
        {"train": 200, "held_out": 40, "unseen": 60}
        if arguments.quick
        else {"train": 2000, "held_out": 200, "unseen": 500}
    )
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, sizes)
        rows = [zero_shot(folder)]
        before = held_out_loss(folder, "zero.yaml")
        rows += [{"what": "held-out loss before", "value": round(before, 4)}]
        rows += [train(folder, "straight", kills=[], chance=chance)]
        steps = len(log_lines(folder / "straight"))
        kills = sorted(chance.sample(range(1, steps + 1), KILLS))
        rows += [train(folder, "killed", kills=kills, chance=chance)]
        after = held_out_loss(folder, "straight")
        rows += [{"what": "held-out loss after", "value": round(after, 4)}]
        rows += [predict(folder, "straight", kills=[], chance=chance)]
        kills = sorted(chance.sample(range(1, sizes["unseen"] - 32), KILLS))
        rows += [predict(folder, "killed", kills=kills, chance=chance)]
        limits = [
            Limit("the known continuation is written (1: yes)", float(rows[0]["value"] == "right"), 1, "min"),
            Limit("held-out loss after over before", round(after / before, 4), 0.6, "max"),
            Limit("lines of log.jsonl that differ, killed from straight", different_lines(folder), 0, "max"),
            Limit("weights that differ, killed from straight", different_weights(folder), 0, "max"),
            Limit("metrics that differ, killed from straight", different_metrics(folder), 0, "max"),
            Limit("predictions that differ, killed from straight", different_predictions(folder), 0, "max"),
        ]
    rows += [{"what": f"random moments drawn with seed {seed}"}]
    report("real_input", rows, limits, arguments=arguments, about=" ".join((__doc__ or "").split("\n\n", 1)[0].split()))


def write_files(folder: Path, sizes: dict[str, int]) -> None:
    """The rows of each part, none of them twice, and the configurations."""
    with PROBLEMS.open(encoding="utf8") as file:
        for name, size in sizes.items():
            (folder / f"{name}.jsonl").write_text("".join(next(file) for _ in range(size)), encoding="utf8")
    (folder / "story.csv").write_text("question\nOnce upon a time\n", encoding="utf8")
    settings: dict[str, Any] = {
        "base_model": str(STORIES),
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 40},
        "preprocessing": {"global_max_sequence_length": 512},
        "data": {"source": "train.jsonl", "validation": "held_out.jsonl", "batching": {"type": "bucket"}},
    }
    settings["data"]["split"] = {"type": "random", "probabilities": [1, 0, 0]}
    finetune = {
        "adapter": {"type": "lora", "r": 16, "dropout": 0.05},
        "trainer": {
            "type": "finetune",
            "epochs": 1,
            "batch_size": 8,
            "eval_batch_size": 32,
            "learning_rate": 5e-3,
            "steps_per_checkpoint": 10,
            "evaluations_per_epoch": 2,
            "evaluate_generated": False,
        },
    }
    zero = {"trainer": {"type": "none", "batch_size": 32}}
    (folder / "zero.yaml").write_text(yaml.safe_dump(settings | zero), encoding="utf8")
    (folder / "lora.yaml").write_text(yaml.safe_dump(settings | finetune), encoding="utf8")


def zero_shot(folder: Path) -> dict[str, Any]:
    partita(folder, "predict", "zero.yaml", "--dataset", "story.csv", "--output", "story.jsonl")
    told = json.loads((folder / "story.jsonl").read_text(encoding="utf8"))["answer"]
    return {"what": "zero-shot continuation of a story", "value": "right" if told == CONTINUATION else f"wrong: {told}"}


def held_out_loss(folder: Path, source: str) -> float:
    """Loss of a model on the held-out rows; of its answers, one token each is generated and ignored."""
    words = ("evaluate", source, "--dataset", "held_out.jsonl", "--set", "generation.max_new_tokens=1", "--json")
    return float(json.loads(partita(folder, *words))["model"]["loss"])


def train(folder: Path, run: str, *, kills: list[int], chance: random.Random) -> dict[str, Any]:
    words = ["train", "lora.yaml", "--run", run]
    seconds = start_again(folder, words, watched=folder / run / "log.jsonl", kills=kills, chance=chance)
    log = log_lines(folder / run)
    return {
        "what": f"training, {run}",
        "value": f"{len(log)} steps",
        "killed at": ", ".join(map(str, kills)),
        "seconds": round(seconds, 1),
        "per second": f"{sum(line['tokens'] for line in log) / sum(line['seconds'] for line in log):,.0f} tokens",
    }


def predict(folder: Path, name: str, *, kills: list[int], chance: random.Random) -> dict[str, Any]:
    # Both ask the same run: what was trained after kills is compared with it elsewhere.
    words = ["predict", "straight", "--dataset", "unseen.jsonl", "--output", f"{name}.jsonl", "--batch-size", "16"]
    watched = folder / "straight" / "journal"
    seconds = start_again(folder, [*words, "--json"], watched=watched, kills=kills, chance=chance, pattern=f"{name}-*")
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().splitlines()]
    tokens = sum(row["tokens"] or 0 for row in rows)
    return {
        "what": f"predicting, {name}",
        "value": f"{len(rows)} rows, {sum(row['status'] == 'ok' for row in rows)} answered",
        "killed at": ", ".join(map(str, kills)),
        "seconds": round(seconds, 1),
        "per second": f"{len(rows) / seconds:.1f} rows, {tokens / seconds:,.0f} tokens",
    }


def start_again(
    folder: Path, words: list[str], *, watched: Path, kills: list[int], chance: random.Random, pattern: str = ""
) -> float:
    """Wall seconds of a command that is killed when the watched file has so many lines, and a random moment later."""
    started = time.perf_counter()
    for lines in kills:
        process = subprocess.Popen(
            [*PARTITA, *words, "--quiet"], cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )
        while count_lines(watched, pattern) < lines:
            if process.poll() is not None:
                sys.exit(f"{words} ended before it could be killed at {lines}")
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    partita(folder, *words)
    return time.perf_counter() - started


def count_lines(watched: Path, pattern: str) -> int:
    """Lines of a file, or of the file in a folder that a pattern fits."""
    path = next(iter(watched.glob(pattern)), watched) if pattern else watched
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def partita(folder: Path, *words: str) -> str:
    command = [*PARTITA, *words, "--quiet"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def log_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf8").splitlines()]


def different_lines(folder: Path) -> int:
    """Steps that are not the same in all but their seconds, or are in one log only."""
    one, other = ([{**line, "seconds": 0} for line in log_lines(folder / name)] for name in ("killed", "straight"))
    return abs(len(one) - len(other)) + sum(a != b for a, b in zip(one, other, strict=False))


def different_weights(folder: Path) -> int:
    """Tensors of the adapter that are not the same bit for bit."""
    one, other = (load_file(folder / name / "model" / "adapter_model.safetensors") for name in ("killed", "straight"))
    return len(one.keys() ^ other.keys()) + sum(
        not bool((one[key] == other[key]).all()) for key in one.keys() & other.keys()
    )


def different_metrics(folder: Path) -> int:
    """Evaluations, during training and after it, that are not the same."""
    one, other = (
        json.loads((folder / name / "manifest.json").read_text(encoding="utf8"))["evaluations"]
        for name in ("killed", "straight")
    )
    return abs(len(one) - len(other)) + sum(a != b for a, b in zip(one, other, strict=False))


def different_predictions(folder: Path) -> int:
    one, other = ((folder / f"{name}.jsonl").read_bytes().splitlines() for name in ("killed", "straight"))
    return abs(len(one) - len(other)) + sum(a != b for a, b in zip(one, other, strict=False))


if __name__ == "__main__":
    main()
