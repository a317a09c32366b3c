"""10,000 rows on two of Ray's workers, one of them killed in the middle; and rows a second beside torchrun's processes.

A new model of 5 M parameters answers prompts of 3 to 60 tokens with up to 24 new ones, in 32 slots a process, each of
one thread. Time is that of the whole call with the model in memory, from reading rows to the file of answers; medians
of three, torchrun and Ray by turns. Rows are counted in the journal: those that are missing, and those that stand there
more than once. The worker is killed after a random share of the rows, while the others are at work.
"""

import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from forked import import_all, run_ranks
from harness import Limit, about, parse_arguments, report

WORKERS = 2
SLOTS = 32
NEW_TOKENS = 24

Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count, rounds = (1000, 1) if arguments.quick else (10_000, 3)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    import_all()
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", count)
        write_rows(folder / "few.jsonl", 2 * SLOTS)
        found["one process"] = [timed(folder, "alone", ranks=1)]
        for number in range(rounds):
            found.setdefault("torchrun", []).append(timed(folder, f"torchrun-{number}", ranks=WORKERS))
            found.setdefault("Ray", []).append(timed(folder, f"ray-{number}", ranks=1, workers=WORKERS))
        after = int(chance.uniform(0.2, 0.8) * count)
        found["Ray, a worker killed"] = [timed(folder, "killed", ranks=1, workers=WORKERS, kill_after=after)]
        same = len({path.read_bytes() for path in folder.glob("*.out.jsonl")}) == 1
    table = [row_of(how, runs, count=count) for how, runs in found.items()]
    rates = {row["how"]: row["rows a second"] for row in table}
    killed = table[-1] | {"killed after rows": after, "seed": seed}
    table[-1] = killed
    limits = [
        Limit("rows lost by the kill", killed["lost"], 0, "max"),
        Limit("rows answered twice", killed["twice"], 0, "max"),
        Limit("workers killed", found["Ray, a worker killed"][0]["killed"], 1, "min"),
        Limit("the same file everywhere", float(same), 1, "min"),
        Limit("rows a second of Ray's workers over torchrun's processes", rates["Ray"] / rates["torchrun"], 0.9, "min"),
    ]
    report("distributed_ray", table, limits, arguments=arguments, about=about(__doc__))


def row_of(how: str, runs: list[Row], *, count: int) -> Row:
    """A line of the table, from one run or several."""
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "how": how,
        "rows": count,
        "seconds": round(seconds, 2),
        "rows a second": round(count / seconds, 1),
        "lost": sum(run["lost"] for run in runs),
        "twice": sum(run["twice"] for run in runs),
    }


def write_rows(path: Path, count: int) -> None:
    """Questions, no two alike."""
    chance = random.Random(1)
    with path.open("w", encoding="utf8") as file:
        for number in range(count):
            words = [f"w{chance.randrange(200)}" for _ in range(chance.randint(1, 58))]
            file.write(json.dumps({"question": f"{number // 200} {number % 200} {' '.join(words)}"}) + "\n")


def timed(folder: Path, name: str, *, ranks: int, workers: int = 0, kill_after: int | None = None) -> Row:
    """A prediction in processes of its own: its seconds, and what its journal says."""

    def work(rank: int) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        from partita.model import Model

        os.chdir(folder)
        backend = {"backend": {"type": "ray", "workers": workers}} if workers else {}
        model = Model(config(folder) | backend, quiet=True)
        model.predict("few.jsonl", fresh=True)  # the model is in memory
        model._backend.context.process_group.all_gather_object(None, "ready")
        killed: list[int] = []
        if kill_after is not None:
            threading.Thread(target=kill_a_worker, args=(folder, name, kill_after, killed), daemon=True).start()
        started = time.perf_counter()
        model.predict("rows.jsonl", output=f"{name}.out.jsonl", fresh=True)
        if rank == 0:
            seconds = time.perf_counter() - started
            (folder / "found.json").write_text(json.dumps({"seconds": seconds, "killed": len(killed)}), encoding="utf8")

    if any(run_ranks(ranks, work, folder=folder).status):
        raise SystemExit(f"{name} failed")
    found: Row = json.loads((folder / "found.json").read_text(encoding="utf8"))
    [journal] = journals(folder, name)
    rows = [json.loads(line)["row"] for line in journal.read_text(encoding="utf8").splitlines()[1:]]
    total = (folder / "rows.jsonl").read_bytes().count(b"\n")
    found |= {"lost": total - len(set(rows)), "twice": len(rows) - len(set(rows))}
    print(name, found, flush=True)
    return found


def config(folder: Path) -> Row:
    """The model and its answers."""
    return {
        "base_model": {
            "type": "scratch",
            "size": "tiny",
            "tokenizer": "word",
            "vocab_size": 256,
            "context_length": 128,
        },
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": NEW_TOKENS},
        "data": {"source": str(folder / "rows.jsonl")},
        "trainer": {"type": "none", "batch_size": SLOTS},
    }


def kill_a_worker(folder: Path, name: str, after: int, killed: list[int]) -> None:
    """Kill one of the workers below this process once so many rows are in the journal."""
    wait_until(lambda: sum(path.read_bytes().count(b"\n") for path in journals(folder, name)) > after)
    workers = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("ray::Worker")]
    chosen = random.choice(workers)
    chosen.kill()
    killed.append(chosen.pid)


def journals(folder: Path, name: str) -> list[Path]:
    """The journal of an output, once it is there."""
    return list((folder / "runs" / "run" / "journal").glob(f"{name}.out-*.jsonl"))


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


if __name__ == "__main__":
    main()
