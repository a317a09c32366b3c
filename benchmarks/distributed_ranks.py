"""The same job on 1, 2 and 4 processes, and on 4, 1, 2 in the middle of epochs with 0, 2, 1 workers.

A model of 0.3 M parameters learns 3,000 SNLI-like rows in steps of four batches, with LoRA's dropout and NEFTune's
noise; then it answers 300 others and is scored on them. Every rank is a process, and they meet over gloo. Steps are
compared by their hashes, which are of all that a step holds, losses by value, answers byte for byte, with one process
that is never stopped. Rows that are encoded are counted over all processes: once in all where they share a cache, once
for each of two machines, played by two caches, where each has its own.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forked import import_all, run_ranks
from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, make_model, settings, snli_rows, write_rows, write_shards

from partita.data.formatting.formatter import Formatter

Row = dict[str, Any]
STEPS = 48
ELASTIC = ((4, 0, 17), (1, 2, 30), (2, 1, STEPS))
"""Ranks, workers, and the step up to which they go."""
COUNTED = "PARTITA_COUNTED"
"""Names the file in which encoded rows are counted."""


class CountingShaper(Formatter):
    """Writes rows as the product does, and a byte for each into a file: `data.formatter`."""

    def format_all(self, rows: Sequence[Any], keys: Sequence[str], *, supervised: bool = True) -> Any:
        descriptor = os.open(os.environ[COUNTED], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b"." * len(rows))
        os.close(descriptor)
        return super().format_all(rows, keys, supervised=supervised)


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 600 if arguments.quick else 3000
    import_all()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PARTITA_CACHE"] = str(folder / "cache")
        kinds = kinds_of(folder, count)
        table = [
            row for kind, config in kinds.items() for row in compared(folder / kind.replace(" ", "-"), kind, config)
        ]
        encoded = [rows_encoded(folder / "encoded", kinds["indexed, bucket"], count)]
    ranks = [row for row in table if "differences" in row]
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in ranks), 0, "max"),
        Limit("largest difference of a loss, relative", max(row["loss differs by"] for row in ranks), 1e-3, "max"),
        Limit("files of answers that differ", sum(row["answers differ"] for row in ranks), 0, "max"),
        Limit("scores that differ", sum(row["scores differ"] for row in ranks), 0, "max"),
        Limit("times a row is encoded, 4 processes, one cache", encoded[0]["one cache"], 1, "max"),
        Limit("times a row is encoded, 2 machines of 2 processes", encoded[0]["two machines"], 2, "max"),
    ]
    report("distributed_ranks", table + encoded, limits, arguments=arguments, about=about(__doc__))


def kinds_of(folder: Path, count: int) -> dict[str, Row]:
    """Files to run, by what is told of them."""
    rows = list(snli_rows(count))
    path = write_rows(folder / "rows.jsonl", iter(rows))
    write_rows(folder / "others.jsonl", snli_rows(300, seed=1))
    shards = write_shards(folder / "shards", rows, 8)
    model = make_model(folder / "model")
    indexed = {"source": str(path), "split": WHOLE, "test": str(folder / "others.jsonl")}
    stream = {"source": {"type": "jsonl", "path": shards, "streaming": True}, "test": str(folder / "others.jsonl")}
    data: dict[str, Row] = {
        "indexed, bucket": indexed | {"batching": {"type": "bucket", "window": 512}},
        "indexed, token_budget": indexed | {"batching": {"type": "token_budget", "max_tokens": 512, "window": 512}},
        "indexed, pack": indexed | {"batching": {"type": "pack", "max_tokens": 128, "window": 512}},
        "stream, bucket": stream | {"batching": {"type": "bucket", "window": 128}},
    }
    found = {}
    for kind, values in data.items():
        config = settings(model, values, max_steps=STEPS)
        trainer = config["trainer"]
        del trainer["gradient_accumulation_steps"], trainer["skip_all_evaluation"]
        trainer |= {"effective_batch_size": 16, "eval_batch_size": 16, "batch_size": 4, "evaluations_per_epoch": 1}
        trainer |= {"learning_rate_scheduler": {"decay": "none"}}
        if values["batching"]["type"] != "bucket":  # how many rows a batch has varies
            del trainer["effective_batch_size"]
        if values["batching"]["type"] == "token_budget":
            del trainer["batch_size"]
        config |= {"adapter": {"type": "lora", "dropout": 0.1}, "generation": {"max_new_tokens": 8}}
        config |= {"model_parameters": {"neftune_noise_alpha": 5}}
        found[kind] = config
    return found


def compared(folder: Path, kind: str, config: Row) -> list[Row]:
    """Rows of the table for one kind of data."""
    jobs: dict[str, Callable[[], Path]] = {
        "1": lambda: whole(folder / "1", config, 1),
        "2": lambda: whole(folder / "2", config, 2),
        "4": lambda: whole(folder / "4", config, 4),
        "4, 1, 2": lambda: elastic(folder / "elastic", config),
    }
    found = {name: job() for name, job in jobs.items()}
    straight = log_of(found["1"])
    table = []
    for name, run in found.items():
        log = log_of(run)
        pairs = list(zip(log, straight, strict=True))
        table.append(
            {
                "data": kind,
                "processes": name,
                "steps": len(log),
                "differences": sum(one["batch_hash"] != other["batch_hash"] for one, other in pairs),
                "loss differs by": max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs),
                "answers differ": int(answers_of(run) != answers_of(found["1"])),
                "scores differ": int(scores_of(run) != scores_of(found["1"])),
            }
        )
        print(table[-1], flush=True)
    return table


def whole(folder: Path, config: Row, ranks: int) -> Path:
    """The run of a job that is not stopped."""
    run_job(folder, four_batches(config, ranks), ranks, steps=STEPS, last=True)
    return folder


def elastic(folder: Path, config: Row) -> Path:
    """The run of a job that goes on with other numbers of processes and workers."""
    begun = four_batches(config, ELASTIC[0][0])
    for ranks, workers, steps in ELASTIC:
        changed = begun | {"data": config["data"] | {"loader": {"workers": workers}}}
        run_job(folder, changed, ranks, steps=steps, last=steps == STEPS)
    return folder


def four_batches(config: Row, ranks: int) -> Row:
    """The file for a job that begins with so many ranks: four batches a step together, also where tokens fill them."""
    if "effective_batch_size" in config["trainer"]:
        return config
    return config | {"trainer": config["trainer"] | {"gradient_accumulation_steps": 4 // ranks}}


def run_job(folder: Path, config: Row, ranks: int, *, steps: int, last: bool) -> None:
    """Train up to a step on so many processes; in the end, answer and score."""

    def work(rank: int) -> None:
        from partita.model import Model

        model = Model(config | {"trainer": config["trainer"] | {"max_steps": steps}}, quiet=True)
        model.train(run=folder)
        if last:
            others = config["data"]["test"]
            model.predict(others, output=folder / "answers.jsonl", batch_size=16)
            scores = model.evaluate(others, batch_size=16)
            if rank == 0:
                (folder / "scores.json").write_text(json.dumps(scores["label"]), encoding="utf8")

    if any(run_ranks(ranks, work, folder=folder).status):
        sys.exit(f"{folder.name}: a rank failed")


def log_of(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf8").splitlines()]


def answers_of(run: Path) -> bytes:
    return (run / "answers.jsonl").read_bytes()


def scores_of(run: Path) -> Row:
    found: Row = json.loads((run / "scores.json").read_text(encoding="utf8"))
    return found


def rows_encoded(folder: Path, config: Row, count: int) -> Row:
    """How often a row is encoded, on 1 and 4 processes, and on two machines of two with a cache each."""
    folder.mkdir()
    counted = config | {"data": config["data"] | {"formatter": "distributed_ranks:CountingShaper"}}
    counted["data"].pop("test")
    counted["trainer"] = config["trainer"] | {"max_steps": 4}
    cached = counted | {"data": counted["data"] | {"encode": "cache"}}

    def times(name: str, file: Row, ranks: int, caches: int = 1) -> float:
        place = folder / name

        def work(rank: int) -> None:
            from partita.model import Model

            os.environ["PARTITA_CACHE"] = str(folder / f"cache-{name}-{rank * caches // ranks}")
            Model(file, quiet=True).train(run=place)

        os.environ[COUNTED] = str(folder / f"{name}.counted")
        if any(run_ranks(ranks, work, folder=place).status):
            sys.exit(f"{name}: a rank failed")
        return Path(os.environ[COUNTED]).stat().st_size / count

    return {
        "rows": count,
        "one process": times("one", counted, 1),
        "4 processes": times("four", counted, 4),
        "one cache": times("cache", cached, 4),
        "two machines": times("machines", cached, 4, caches=2),
    }


if __name__ == "__main__":
    main()
