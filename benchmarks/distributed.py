"""Jobs on several processes: the same results as one process, memory shared with FSDP2, and workers of Ray."""

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixtures import (
    WHOLE,
    WORD_MODEL,
    log_of,
    make_model,
    read_rows,
    settings,
    snli_rows,
    write_rows,
    write_shards,
    zero_shot,
)
from harness import Limit, Result, Row, main
from processes import count_lines, import_all, must_run_ranks

from partita.data.formatting.formatter import Formatter

STEPS = 48
ELASTIC = ((4, 0, 17), (1, 2, 30), (2, 1, STEPS))
"""Processes, workers, and the step at which they stop."""
COUNTED = "PARTITA_COUNTED"
"""Environment variable: file in which encoded rows are counted."""
FILES = ("answers.jsonl", "scores.json")
"""Files written by the ranks, compared byte for byte."""
SHARDING = {"whole": "none", "shared": "full"}
SHARDING_CASES = (("whole", 1), ("whole", 2), ("shared", 2), ("shared", 4))
MEASURED_FROM = 3
"""Step from which memory is measured: optimizers have their state then."""
RAY_WORKERS = 2
RAY_SLOTS = 32


class CountingFormatter(Formatter):
    """Formats rows like partita, and writes a byte for each into a file: `data.formatter`."""

    def format_all(self, rows: Sequence[Any], keys: Sequence[str], *, supervised: bool = True) -> Any:
        descriptor = os.open(os.environ[COUNTED], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b"." * len(rows))
        os.close(descriptor)
        return super().format_all(rows, keys, supervised=supervised)


# The same job on other numbers of processes


def ranks(folder: Path, quick: bool) -> Result:
    """The same job on 1, 2 and 4 processes, and on 4, 1, 2 in the middle of epochs with 0, 2, 1 workers.

    A model of 0.3 M parameters is trained on 3,000 SNLI-like rows in steps of four batches, with LoRA dropout and
    NEFTune noise; then it predicts and scores 300 other rows. Every rank is a process, and they communicate over gloo.
    Hashes of all contents of a step, losses and answers are compared with one process that is never stopped. Encoded
    rows are counted over all processes: once if they share a cache, once per machine for two machines, simulated by two
    caches.
    """
    count = 600 if quick else 3000
    import_all()
    kinds = kinds_of(folder, count)
    table = [row for kind, config in kinds.items() for row in compared(folder / kind.replace(" ", "-"), kind, config)]
    encoded = rows_encoded(folder / "encoded", kinds["indexed, bucket"], count)
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("largest difference of a loss, relative", max(row["loss differs by"] for row in table), 1e-3, "max"),
        Limit("files of answers that differ", sum(row["answers differ"] for row in table), 0, "max"),
        Limit("scores that differ", sum(row["scores differ"] for row in table), 0, "max"),
        Limit("times a row is encoded, 4 processes, one cache", encoded["one cache"], 1, "max"),
        Limit("times a row is encoded, 2 machines of 2 processes", encoded["two machines"], 2, "max"),
    ]
    return [*table, encoded], limits


def kinds_of(folder: Path, count: int) -> dict[str, Row]:
    """Return configs by the name of their data."""
    rows = list(snli_rows(count))
    path = write_rows(folder / "rows.jsonl", rows)
    others = {"test": str(write_rows(folder / "others.jsonl", snli_rows(300, seed=1)))}
    shards = write_shards(folder / "shards", rows, 8)
    model = make_model(folder / "model")
    indexed = {"source": str(path), "split": WHOLE, **others}
    stream = {"source": {"type": "jsonl", "path": shards, "streaming": True}, **others}
    data: dict[str, Row] = {
        "indexed, bucket": indexed | {"batching": {"type": "bucket", "window": 512}},
        "indexed, token_budget": indexed | {"batching": {"type": "token_budget", "max_tokens": 512, "window": 512}},
        "indexed, pack": indexed | {"batching": {"type": "pack", "max_tokens": 128, "window": 512}},
        "stream, bucket": stream | {"batching": {"type": "bucket", "window": 128}},
    }
    found = {}
    for kind, values in data.items():
        config = settings(model, values, max_steps=STEPS, batch_size=4)
        trainer = config["trainer"]
        del trainer["gradient_accumulation_steps"], trainer["skip_all_evaluation"]
        trainer |= {"effective_batch_size": 16, "eval_batch_size": 16, "evaluations_per_epoch": 1}
        trainer |= {"learning_rate_scheduler": {"decay": "none"}}
        if values["batching"]["type"] != "bucket":  # the number of rows per batch varies
            del trainer["effective_batch_size"]
        config |= {"adapter": {"type": "lora", "dropout": 0.1}, "generation": {"max_new_tokens": 8}}
        config |= {"model_parameters": {"neftune_noise_alpha": 5}}
        found[kind] = config
    return found


def compared(folder: Path, kind: str, config: Row) -> list[Row]:
    """Return rows of the table for one kind of data."""
    runs = {name: folder / name for name in ("1", "2", "4", "4, 1, 2")}
    for ranks in (1, 2, 4):
        run_job(runs[str(ranks)], four_batches(config, ranks), ranks, steps=STEPS)
    for ranks, workers, steps in ELASTIC:
        begun = four_batches(config, ELASTIC[0][0])
        changed = begun | {"data": config["data"] | {"loader": {"workers": workers}}}
        run_job(runs["4, 1, 2"], changed, ranks, steps=steps)
    straight = log_of(runs["1"])
    table = []
    for name, run in runs.items():
        pairs = list(zip(log_of(run), straight, strict=True))
        same = [
            (run / file).read_bytes() == (runs["1"] / file).read_bytes() for file in ("answers.jsonl", "scores.json")
        ]
        table.append(
            {
                "data": kind,
                "processes": name,
                "steps": len(pairs),
                "differences": sum(one["batch_hash"] != other["batch_hash"] for one, other in pairs),
                "loss differs by": max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs),
                "answers differ": int(not same[0]),
                "scores differ": int(not same[1]),
            }
        )
        print(table[-1], flush=True)
    return table


def four_batches(config: Row, ranks: int) -> Row:
    """Return the config of a job that starts with `ranks` ranks and has four batches per step in total."""
    if "effective_batch_size" in config["trainer"]:
        return config
    return config | {"trainer": config["trainer"] | {"gradient_accumulation_steps": 4 // ranks}}


def run_job(run: Path, config: Row, ranks: int, *, steps: int) -> None:
    """Train up to a step on `ranks` processes; after the last step, predict and evaluate."""

    def work(rank: int) -> None:
        from partita.model import Model

        model = Model(config | {"trainer": config["trainer"] | {"max_steps": steps}}, quiet=True)
        model.train(run=run)
        if steps == STEPS:
            others = config["data"]["test"]
            model.predict(others, output=run / "answers.jsonl", batch_size=16)
            scores = model.evaluate(others, batch_size=16)
            if rank == 0:
                (run / "scores.json").write_text(json.dumps(scores["label"], sort_keys=True), encoding="utf8")

    must_run_ranks(ranks, work)


def rows_encoded(folder: Path, config: Row, count: int) -> Row:
    """Return how often a row is encoded on 1 and 4 processes, and on two machines of two with separate caches."""
    folder.mkdir()
    data = {name: value for name, value in config["data"].items() if name != "test"}
    data["formatter"] = "distributed:CountingFormatter"
    counted = config | {"data": data, "trainer": config["trainer"] | {"max_steps": 4}}
    cached = counted | {"data": data | {"encode": "cache"}}

    def times(name: str, config: Row, ranks: int, caches: int = 1) -> float:
        def work(rank: int) -> None:
            from partita.model import Model

            os.environ["PARTITA_CACHE"] = str(folder / f"cache-{name}-{rank * caches // ranks}")
            Model(config, quiet=True).train(run=folder / name)

        os.environ[COUNTED] = str(folder / f"{name}.counted")
        must_run_ranks(ranks, work)
        return Path(os.environ[COUNTED]).stat().st_size / count

    return {
        "rows": count,
        "one process": times("one", counted, 1),
        "4 processes": times("four", counted, 4),
        "one cache": times("cache", cached, 4),
        "two machines": times("machines", cached, 4, caches=2),
    }


# Sharded weights


def sharding(folder: Path, quick: bool) -> Result:
    """Full fine-tuning on processes that each have the whole model, compared with sharded weights (FSDP2).

    A Llama of 22 M parameters in float32 with AdamW: four numbers per weight, for the weight, its gradient and two
    averages. Memory is that of a process above its memory before training: the peak over the steps, and the overall
    peak with loading, a checkpoint and the result, for the first process and the others; freed memory returns to the
    system at once. Every process has one thread. They communicate over gloo on one machine, where the computing cores
    also copy: the time of a step does not transfer to devices with a network.
    """
    steps = 6 if quick else 12
    import_all()
    rows = write_rows(folder / "rows.jsonl", snli_rows(600))
    table = [sharding_row(folder, rows, kind, ranks, steps=steps) for kind, ranks in SHARDING_CASES]
    found = {(row["weights"], row["processes"]): row for row in table}
    whole, shared, four = found["whole", 2], found["shared", 2], found["shared", 4]
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("largest difference of a loss, relative", max(row["loss differs by"] for row in table), 1e-3, "max"),
        Limit("memory in steps, 2 sharing over 2 whole", shared["MB in steps"] / whole["MB in steps"], 0.65, "max"),
        Limit("memory in steps, 4 sharing over 2 whole", four["MB in steps"] / whole["MB in steps"], 0.5, "max"),
        Limit("seconds of a step, 2 sharing over 2 whole", shared["s a step"] / whole["s a step"], 1.5, "max"),
    ]
    return table, limits


def sharding_row(folder: Path, rows: Path, kind: str, ranks: int, *, steps: int) -> Row:
    """Train on `ranks` processes; return the memory and time of the first process and of the others."""
    run = folder / f"{kind}-{ranks}"
    config = settings(Path(), {"source": str(rows), "split": WHOLE}, max_steps=steps)
    config |= {"base_model": LLAMA_22M, "backend": {"type": "torchrun", "sharding": SHARDING[kind]}}
    del config["trainer"]["gradient_accumulation_steps"]
    config["trainer"] |= {"batch_size": 4, "effective_batch_size": 16, "learning_rate_scheduler": {"decay": "none"}}

    def work(rank: int) -> None:
        (folder / f"{kind}-{ranks}-{rank}.json").write_text(json.dumps(measured(config, run)), encoding="utf8")

    must_run_ranks(ranks, work)
    found = [json.loads((folder / f"{kind}-{ranks}-{rank}.json").read_text("utf8")) for rank in range(ranks)]
    log, first = log_of(run), log_of(folder / "whole-1")
    pairs = list(zip(log, first, strict=True))
    row = {
        "weights": kind,
        "processes": ranks,
        "numbers of a process": found[0]["numbers"],
        "MB in steps": max(one["steps"] for one in found),
        "MB in all, first": found[0]["all"],
        "MB in all, others": max((one["all"] for one in found[1:]), default=None),
        "s a step": statistics.median(line["seconds"] for line in log[MEASURED_FROM:]),
        "CPU s a step": sum(one["cpu"] for one in found) / len(log),
        "differences": sum(one["batch_hash"] != other["batch_hash"] for one, other in pairs),
        "loss differs by": max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs),
    }
    print(row, flush=True)
    return row


LLAMA_22M = {
    "type": "scratch",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "context_length": 128,
    "tokenizer": "bpe",
    "vocab_size": 2000,
}


def measured(config: Row, run: Path) -> Row:
    """Train; return megabytes above those at the start, and CPU seconds of steps."""
    from partita.model import Model
    from partita_trainers import finetune_run
    from partita_trainers.batch_size.linux import exact_allocations

    take_step, begun, peaks, seconds = finetune_run.take_step, memory("VmRSS"), [0.0], [0.0]

    def watched(*given: Any, **named: Any) -> Any:
        if named["number"] == MEASURED_FROM:
            peaks[0] = memory("VmHWM")
            Path("/proc/self/clear_refs").write_text("5", encoding="utf8")  # reset the peak
        started = time.process_time()
        found = take_step(*given, **named)
        seconds[0] += time.process_time() - started
        if named["number"] >= MEASURED_FROM:
            peaks.append(memory("VmHWM"))
        return found

    finetune_run.take_step = watched  # type: ignore[assignment]
    with exact_allocations():
        Model(config, quiet=True).train(run=run)
    manifest = json.loads((run / "manifest.json").read_text("utf8"))
    return {
        "steps": max(peaks[1:]) - begun,
        "all": max(*peaks, memory("VmHWM")) - begun,
        "cpu": seconds[0],
        "numbers": manifest.get("parameters_per_process", manifest["parameters"]),
    }


def memory(name: str) -> float:
    """Return a memory value of this process reported by Linux, in megabytes."""
    lines = Path("/proc/self/status").read_text("utf8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


# Ray


def ray(folder: Path, quick: bool) -> Result:
    """10,000 rows on two workers of Ray, one of them killed; and rows per second compared with torchrun processes.

    A new model of 5 M parameters answers prompts of 3 to 60 tokens with up to 24 new ones, in 32 slots per process of
    one thread. Time is that of the whole call with the model in memory, from reading rows to the output file; medians
    of three, torchrun and Ray in turn. The journal shows which rows are missing or repeated. The worker is killed after
    a random fraction of the rows, while the others work.
    """
    count, rounds = (1000, 1) if quick else (10_000, 3)
    seed = random.randrange(2**32)
    after = int(random.Random(seed).uniform(0.2, 0.8) * count)
    import_all()
    write_questions(folder / "rows.jsonl", count)
    write_questions(folder / "few.jsonl", 2 * RAY_SLOTS)
    found = {"one process": [timed(folder, "alone", ranks=1)]}
    for number in range(rounds):
        found.setdefault("torchrun", []).append(timed(folder, f"torchrun-{number}", ranks=RAY_WORKERS))
        found.setdefault("Ray", []).append(timed(folder, f"ray-{number}", ranks=1, workers=RAY_WORKERS))
    found["Ray, a worker killed"] = [timed(folder, "killed", ranks=1, workers=RAY_WORKERS, kill_after=after)]
    same = len({path.read_bytes() for path in folder.glob("*.out.jsonl")}) == 1
    table = [ray_row(how, runs, count=count) for how, runs in found.items()]
    rates = {row["how"]: row["rows a second"] for row in table}
    killed = table[-1] = table[-1] | {"killed after rows": after, "seed": seed}
    limits = [
        Limit("rows lost by the kill", killed["lost"], 0, "max"),
        Limit("rows answered twice", killed["twice"], 0, "max"),
        Limit("workers killed", found["Ray, a worker killed"][0]["killed"], 1, "min"),
        Limit("the same file everywhere", float(same), 1, "min"),
        Limit("rows a second of Ray's workers over torchrun's processes", rates["Ray"] / rates["torchrun"], 0.9, "min"),
    ]
    return table, limits


def ray_row(how: str, runs: list[Row], *, count: int) -> Row:
    """Return a row of the table from one or several runs."""
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "how": how,
        "rows": count,
        "seconds": round(seconds, 2),
        "rows a second": round(count / seconds, 1),
        "lost": sum(run["lost"] for run in runs),
        "twice": sum(run["twice"] for run in runs),
    }


def write_questions(path: Path, count: int) -> None:
    """Write different questions."""
    rng = random.Random(1)
    ends = (" ".join(f"w{rng.randrange(200)}" for _ in range(rng.randint(1, 58))) for _ in range(count))
    write_rows(path, ({"question": f"{number // 200} {number % 200} {end}"} for number, end in enumerate(ends)))


def timed(folder: Path, name: str, *, ranks: int, workers: int = 0, kill_after: int | None = None) -> Row:
    """Predict in new processes; return the seconds and the contents of the journal."""
    backend = {"backend": {"type": "ray", "workers": workers}} if workers else {}
    data = {"source": str(folder / "rows.jsonl")}
    config = zero_shot(
        WORD_MODEL, "question answer", tokens=24, data=data, trainer={"batch_size": RAY_SLOTS}, **backend
    )

    def work(rank: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        from partita.model import Model

        os.chdir(folder)
        model = Model(config, quiet=True)
        model.predict("few.jsonl", fresh=True)  # load the model
        model._backend.context.process_group.all_gather_object(None, "ready")
        killed: list[int] = []
        if kill_after is not None:
            threading.Thread(target=kill_a_worker, args=(folder, name, kill_after, killed), daemon=True).start()
        started = time.perf_counter()
        model.predict("rows.jsonl", output=f"{name}.out.jsonl", fresh=True)
        if rank == 0:
            seconds = time.perf_counter() - started
            (folder / "found.json").write_text(json.dumps({"seconds": seconds, "killed": len(killed)}), encoding="utf8")

    must_run_ranks(ranks, work)
    found: Row = json.loads((folder / "found.json").read_text(encoding="utf8"))
    [journal] = folder.glob(journal_of(name))
    rows = [line["row"] for line in read_rows(journal)[1:]]
    found |= {"lost": count_lines(folder, "rows.jsonl") - len(set(rows)), "twice": len(rows) - len(set(rows))}
    print(name, found, flush=True)
    return found


def kill_a_worker(folder: Path, name: str, after: int, killed: list[int]) -> None:
    """Kill one of the worker processes when `after` rows are in the journal."""
    import psutil

    while count_lines(folder, journal_of(name)) <= after:
        time.sleep(0.002)
    workers = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("ray::Worker")]
    chosen = random.choice(workers)
    chosen.kill()
    killed.append(chosen.pid)


def journal_of(name: str) -> str:
    """Return the glob pattern of the journal of an output."""
    return f"runs/run/journal/{name}.out-*.jsonl"


if __name__ == "__main__":
    main(ranks, sharding, ray)
