"""Language modelling on chunks of joined documents: throughput, resuming, and memory for 5 GB of text."""

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fixtures import make_model, shard_names, spending, train_timed, tree_memory, with_batches, words, write_shards
from harness import Limit, Result, Row, call, command, main, one_thread

LENGTH, LINES = 256, 8
"""Tokens of a chunk, and chunks of a batch."""
ROUNDS = 5
SHARES = (0.01, 0.5, 0.99)
LARGE_BYTES = 5 * 10**9
MOST_BYTES = 10**9


def config_of(model: Path, source: Any, **changes: Any) -> Row:
    return {
        "base_model": str(model),
        "seed": 7,
        "output_features": [{"name": "text", "type": "text"}],
        "data": {
            "source": source,
            "batching": {"type": "chunk", "context_length": LENGTH},
            **({} if isinstance(source, dict) else {"split": {"type": "random", "probabilities": [1, 0, 0]}}),
        },
        "trainer": {
            "type": "finetune",
            "batch_size": LINES,
            "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "learning_rate_scheduler": {"decay": "constant", "warmup_steps": 0},
            "skip_all_evaluation": True,
            "checkpoints_per_epoch": 0,
            "max_steps": 10**6,
        }
        | changes,
    }


def documents(count: int) -> list[Row]:
    """Return documents of 20 to 2,000 words, most of them short."""
    rng = random.Random(5)
    return [{"text": words(rng, min(2000, max(20, round(rng.lognormvariate(4.5, 1.0)))))} for _ in range(count)]


# Throughput


def train(folder: Path, quick: bool) -> Result:
    """Tokens per CPU second of training on chunks, beside a plain torch loop over the same chunks as one tensor.

    A Llama of 0.3 million parameters, chunks of 256 tokens in batches of 8, AdamW with a constant learning rate,
    gradients clipped at 1, fp32, one thread. The plain loop has its chunks before it begins; it neither logs nor saves.
    Contenders run in turn, each in its own process; the ratio is the median over the rounds.
    """
    steps, rounds = (100, 1) if quick else (150, ROUNDS)
    make_model(folder / "model")
    write_shards(folder / "shards", documents(3000), 1)
    found: dict[str, list[Row]] = {"plain torch loop": [], "partita": []}
    for _ in range(rounds):
        found["plain torch loop"].append(call(train_plain, folder, steps))
        found["partita"].append(call(train_partita, folder, steps))
    pairs = zip(found["plain torch loop"], found["partita"], strict=True)
    ratios = [ours["tokens/CPU s"] / plain["tokens/CPU s"] for plain, ours in pairs]
    table = [
        {"contender": name, **{key: statistics.median(row[key] for row in rows) for key in rows[0]}}
        for name, rows in found.items()
    ]
    return table, [Limit("tokens per CPU second over the plain loop", round(statistics.median(ratios), 3), 0.97, "min")]


def train_plain(name: str, steps: int) -> Row:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = Path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").train()
    texts = [json.loads(line)["text"] for line in shard_names(folder / "shards", 1)[0].read_text().splitlines()]
    ids = [token for one in tokenizer(texts)["input_ids"] for token in [*one, tokenizer.eos_token_id]]
    chunks_CT = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.randperm(len(chunks_CT), generator=torch.Generator().manual_seed(7))
    started, losses = time.process_time(), []
    for step in range(steps):
        rows = order[torch.arange(step * LINES, (step + 1) * LINES) % len(order)]
        batch_BT = chunks_CT[rows]
        loss = model(input_ids=batch_BT, labels=batch_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return result_of(steps, time.process_time() - started, losses)


def train_partita(name: str, steps: int) -> Row:
    folder = Path(name)
    config = config_of(folder / "model", str(shard_names(folder / "shards", 1)[0]), max_steps=steps)
    log, spent = train_timed(config)
    return result_of(steps, spent.cpu, [line["loss"] for line in log])


def result_of(steps: int, cpu: float, losses: list[float]) -> Row:
    return {
        "tokens/CPU s": round(steps * LINES * LENGTH / cpu, 1),
        "CPU s": round(cpu, 2),
        "mean loss": round(statistics.mean(losses), 3),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


# Resuming


def resume(folder: Path, quick: bool) -> Result:
    """CPU seconds to the first batch after a resume at 1, 50 and 99 % of an epoch of chunks.

    Files, tokenizer and plan are already open; measured is what depends on the position. The stream has four files and
    the default window of 1,024 documents; what follows is compared with the uninterrupted epoch, chunk by chunk.
    """
    count = 3000 if quick else 12_000
    make_model(folder / "model")
    pattern = write_shards(folder / "shards", documents(count), 4)
    sources = {"indexed": pattern, "stream": {"type": "jsonl", "path": pattern, "streaming": True}}
    rows: list[Row] = []
    for name, source in sources.items():
        rows += [{"resumed": name, **row} for row in resumed(folder, name, source)]
    limits = [
        limit
        for name, most in (("indexed", 0.05), ("stream", 0.5))
        for limit in (
            Limit(
                f"{name}: most CPU seconds to the first batch",
                max(row["CPU s"] for row in rows if row["resumed"] == name),
                most,
                "max",
            ),
            Limit(
                f"{name}: chunks that differ after a resume",
                sum(row["different"] for row in rows if row["resumed"] == name),
                0,
                "max",
            ),
        )
    ]
    return rows, limits


def resumed(folder: Path, name: str, source: Any) -> list[Row]:
    config = config_of(folder / "model", source)
    chunks: list[Any] = []
    data_positions: list[Any] = []

    def look(batches: Any) -> None:
        for step in batches.steps():
            if step.epoch >= 1 and isinstance(source, dict):  # the first step of the next epoch
                return
            chunks.append([batch.input_ids_BT.tolist() for batch in step.micro_batches])
            data_positions.append(json.loads(json.dumps(step.data_position)))
            if step.epoch >= 1:
                return

    with_batches(config, look, run=folder / f"{name}-whole")
    found: list[Row] = []
    for share in SHARES:
        at = max(1, int(share * len(data_positions)))
        follow = resumed_at(data_positions[at - 1], chunks[at:], found, share=share)
        with_batches(config, follow, run=folder / f"{name}-{share}")
    return found


def resumed_at(data_position: Any, wanted: list[Any], found: list[Row], *, share: float) -> Callable[[Any], None]:
    def consume(batches: Any) -> None:
        with spending() as spent:
            batches.load_data_position(data_position)
            steps = batches.steps()
            first = next(steps)
        after = [first, *(next(steps) for _ in range(len(wanted) - 1))]
        steps.close()
        seen = [[batch.input_ids_BT.tolist() for batch in step.micro_batches] for step in after]
        found.append(
            {
                "at": f"{share:.0%}",
                "CPU s": round(spent.cpu, 4),
                "seconds": round(spent.wall, 4),
                "state bytes": len(json.dumps(data_position)),
                "steps compared": len(wanted),
                "different": sum(one != other for one, other in zip(seen, wanted, strict=True)),
            }
        )

    return consume


# Memory


def memory(folder: Path, quick: bool) -> Result:
    """Memory of an epoch over 5 GB of text as a stream of chunks, with two workers, all batches made and counted.

    Documents of about 4 KB in 16 files. Memory is that of the process and of all it started, shared pages counted once,
    sampled five times a second.
    """
    make_model(folder / "model")
    wanted = 10**8 if quick else LARGE_BYTES
    size = write_text(folder / "shards", wanted)
    started = time.perf_counter()
    process = subprocess.Popen(command(read_chunks, folder), env=one_thread(), stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_memory(process.pid))
        time.sleep(0.2)
    said = process.stdout.read() if process.stdout is not None else ""
    if process.returncode:
        sys.exit(f"reading ended with {process.returncode}")
    seconds = time.perf_counter() - started
    row = {
        "data MB": size // 10**6,
        **json.loads(said.splitlines()[-1]),
        "seconds": round(seconds),
        "MB a second": round(size / seconds / 10**6, 1),
        "peak MB": peak // 10**6,
    }
    limits = [
        Limit("most MB of memory, workers included", peak // 10**6, MOST_BYTES // 10**6, "max"),
        Limit("share of chunks that are full", row["full"], 0.99, "min"),
    ]
    return [row], limits


def write_text(folder: Path, wanted: int) -> int:
    """Write files of this many bytes in all; return their size."""
    rng = random.Random(3)
    pieces = [words(rng, 50) for _ in range(500)]
    folder.mkdir()
    written = 0
    for number, path in enumerate(shard_names(folder, 16), start=1):
        with path.open("w", encoding="utf8") as file:
            while written < wanted * number // 16:
                text = " ".join(rng.choices(pieces, k=rng.randint(2, 24)))
                written += file.write(json.dumps({"text": text}) + "\n")
    return written


def read_chunks(name: str) -> Row:
    folder = Path(name)
    found: Row = {"chunks": 0, "tokens": 0, "full": 0.0}

    def consume(batches: Any) -> None:
        for step in batches.steps():
            if step.epoch >= 1:
                return
            for batch in step.micro_batches:
                found["chunks"] += batch.sequences
                found["tokens"] += batch.tokens
                found["full"] += int((batch.lengths_B == LENGTH).sum())

    source = {"type": "jsonl", "path": str(folder / "shards" / "part-*.jsonl"), "streaming": True}
    config = config_of(folder / "model", source)
    config["data"]["loader"] = {"workers": 2}
    with_batches(config, consume, run=Path(tempfile.mkdtemp(dir=folder)) / "run")
    found["full"] = round(found["full"] / found["chunks"], 4)
    return found


if __name__ == "__main__":
    main(train, resume, memory)
