"""Twenty SIGKILLs at random moments of training, half of them while a checkpoint is written.

A new model learns 2,400 SNLI-like rows for two epochs, a checkpoint every five steps: rows that are encoded, in
batches by a token budget, and a stream of four shards, each with two workers, two batches a step and ten kills. Each
attempt is a process of its own, forked behind the imports. Losses, and hashes of every batch of every step that any
attempt took, are compared with a run that nobody killed; rows are counted over its epochs.
"""

import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, make_model, settings, snli_rows, step_hash, write_rows, write_shards

EPOCHS = 2
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count, kills = (600, 2) if arguments.quick else (2400, 10)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(snli_rows(count))
        path = write_rows(folder / "rows.jsonl", iter(rows))
        shards = write_shards(folder / "shards", rows, 4)
        model = make_model(folder / "model")
        kinds: dict[str, Row] = {
            "indexed, token_budget": {
                "source": str(path),
                "split": WHOLE,
                "batching": {"type": "token_budget", "max_tokens": 512, "window": 512},
            },
            "stream, bucket": {
                "source": {"type": "jsonl", "path": shards, "streaming": True},
                "batching": {"type": "bucket", "window": 256},
            },
        }
        table = []
        for kind, data in kinds.items():
            config = file_of(model, data, count)
            import_all()
            table.append(measure(folder / kind.split(",")[0], kind, config, count, kills, chance))
    limits = [
        Limit("losses, batches or checkpoints that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("rows lost or doubled", sum(row["lost"] + row["doubled"] for row in table), 0, "max"),
        Limit("kills", sum(row["kills"] for row in table), 2 * kills, "min"),
        Limit("kills while a checkpoint was written", sum(row["while saving"] for row in table), kills // 2, "min"),
    ]
    table.append({"training": f"random moments drawn with seed {seed}"})
    report("data_kills", table, limits, arguments=arguments, about=about(__doc__))


def file_of(model: Path, data: Row, count: int) -> Row:
    streaming = not isinstance(data["source"], str)
    # A stream has no epochs to be asked for; two batches of 16 rows are a step.
    changes: Row = {"max_steps": EPOCHS * count // 32} if streaming else {"epochs": EPOCHS}
    changes |= {"steps_per_checkpoint": 5, "checkpoints_per_epoch": 0, "gradient_accumulation_steps": 2}
    config = settings(model, data | {"loader": {"workers": 2}}, **changes)
    if data["batching"]["type"] == "token_budget":
        del config["trainer"]["batch_size"]
    else:
        config["trainer"]["batch_size"] = 16
    return config


def import_all() -> None:
    """What each attempt would spend its time on."""
    import torch

    needed = ("accelerate", "bitsandbytes", "peft", "transformers.models.llama.modeling_llama", "sympy")
    for name in (*needed, "partita.model", "partita_trainers.finetune"):
        importlib.import_module(name)
    torch.set_num_threads(1)


def measure(folder: Path, kind: str, config: Row, count: int, kills: int, chance: random.Random) -> Row:
    folder.mkdir()
    started = time.perf_counter()
    wait_for(attempt(config, folder / "straight"))
    steps = len(lines(folder / "straight" / "log.jsonl"))
    saving = sorted(chance.sample(range(kills), kills // 2))
    found = Counter[str]()
    for number, step in enumerate(sorted(chance.sample(range(1, steps - 5), kills))):
        found += kill_at(config, folder / "killed", step, in_checkpoint=number in saving, chance=chance)
    wait_for(attempt(config, folder / "killed"))
    straight, killed = (records(folder / name) for name in ("straight", "killed"))
    right = {record["step"]: record["hash"] for record in straight}
    effective = {record["step"]: record["keys"] for record in killed}
    lost, doubled = counted([effective.get(step, []) for step in sorted(right)], count)
    return {
        "training": kind,
        "steps": steps,
        "kills": found["kills"],
        "while saving": found["while saving"],
        "steps taken again": len(killed) - len(effective),
        "differences": sum(record["hash"] != right.get(record["step"]) for record in killed)
        + len(right.keys() ^ effective.keys())
        + different_lines(folder)
        + different_cursors(folder),
        "lost": lost,
        "doubled": doubled,
        "seconds": round(time.perf_counter() - started, 1),
    }


def attempt(config: Row, run: Path) -> int:
    """Number of a process that trains, from the newest checkpoint to the end."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        train(config, run)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def train(config: Row, run: Path) -> None:
    """Train, and write down a hash of each step before it is taken."""
    from partita.model import Model
    from partita_trainers.finetune import FinetuneRun

    take_step = FinetuneRun.take_step

    def noted(training: Any, step: Any, *, number: int, **named: Any) -> Any:
        keys = [key for batch in step.micro_batches for key in batch.keys]
        record = {"step": number, "hash": step_hash(step), "keys": keys}
        with run.with_suffix(".steps").open("a", encoding="utf8") as file:
            file.write(json.dumps(record) + "\n")
        return take_step(training, step, number=number, **named)

    FinetuneRun.take_step = noted  # type: ignore[method-assign]
    Model(config, quiet=True).train(run=run)


def kill_at(config: Row, run: Path, step: int, *, in_checkpoint: bool, chance: random.Random) -> Counter[str]:
    """Kill an attempt a moment behind a step, or while it writes the next checkpoint."""
    process = attempt(config, run)
    while len(lines(run / "log.jsonl")) < step:
        alive(process)
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.1))
    if in_checkpoint:
        while not unfinished(run):
            alive(process)
        time.sleep(chance.uniform(0, 0.002))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return Counter({"kills": 1, "while saving": int(unfinished(run))})


def alive(process: int) -> None:
    if os.waitpid(process, os.WNOHANG)[0]:
        sys.exit("a run ended before it could be killed")


def unfinished(run: Path) -> bool:
    """Whether there is a checkpoint that is not complete."""
    return any(run.glob("checkpoints/.*"))


def wait_for(process: int) -> None:
    if os.waitpid(process, 0)[1]:
        sys.exit("a run failed")


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def records(run: Path) -> list[Row]:
    """Steps of all attempts; the line that a kill cut off is none."""
    found = []
    for line in lines(run.with_suffix(".steps")):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def counted(keys: list[list[str]], count: int) -> tuple[int, int]:
    """Rows that are missing from an epoch, and those that are in it again, over all whole epochs."""
    lost, doubled, epoch = 0, 0, Counter[str]()
    for step in keys:
        epoch.update(step)
        if epoch.total() >= count:
            lost += count - len(epoch)
            doubled += epoch.total() - len(epoch)
            epoch = Counter()
    return lost, doubled


def different_lines(folder: Path) -> int:
    """Lines of log.jsonl that differ in anything but seconds."""
    one, other = (
        [{**json.loads(line), "seconds": 0} for line in lines(folder / name / "log.jsonl")]
        for name in ("straight", "killed")
    )
    return abs(len(one) - len(other)) + sum(a != b for a, b in zip(one, other, strict=False))


def different_cursors(folder: Path) -> int:
    """Positions in the last checkpoints that differ."""
    one, other = (
        {path.parent.name: path.read_text("utf8") for path in (folder / name).glob("checkpoints/*/cursor.json")}
        for name in ("straight", "killed")
    )
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


if __name__ == "__main__":
    sys.exit(main())
