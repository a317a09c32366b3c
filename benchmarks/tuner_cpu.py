"""The tuner on a CPU beside brute force: what truly fits, what is truly fastest, and what finding it costs.

Needs the shared folder beside the checkout. Zero-shot prediction of 512 rows of skewed lengths, 32 new tokens, fp32, a
single thread, in slots. Memory: for several values of memory_budget, the most of the longest prompts that are answered
at once, all tokens, under a limit of the system on the process's data (RLIMIT_DATA), each size in a process of its
own, beside what the tuner says fits. Speed: the CPU seconds of the whole job at many sizes, in turn, beside the size
that the tuner chooses when memory is plenty; and the CPU seconds of finding it over that job's.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import SHARED, Limit, parse_arguments, report, run_script

ROOMS = {"tiny": (300_000_000, 500_000_000, 800_000_000), "small": (400_000_000,)}
"""Bytes beyond what the process holds with the model loaded."""
SIZES = {"tiny": (16, 32, 64, 96, 128, 192), "small": (48, 96)}
ROUNDS = {"tiny": 3, "small": 1}
NEW_TOKENS = 32


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    if not SHARED.is_dir():
        sys.exit(f"needs the shared folder at {SHARED}")
    names = ["tiny"] if arguments.quick else ["tiny", "small"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PARTITA_CACHE"] = f"{folder}/cache"
        run_script([SHARED / "peers" / "workload.py", folder])
        with ThreadPoolExecutor(len(names)) as pool:  # each works in processes of its own, on a core of its own
            for found in pool.map(lambda name: study(folder, name, quick=arguments.quick), names):
                rows += found
    memory = [row for row in rows if row["what"] == "memory"]
    speed = [row for row in rows if row["what"] == "speed"]
    limits = [
        Limit("share of what truly fits, least", min(row["share"] for row in memory), 0.94, "min"),
        Limit("share of what truly fits, most", max(row["share"] for row in memory), 1.0, "max"),
        Limit("processes of the tuner that a signal ended", sum(row["tuner killed"] for row in memory), 0, "max"),
        Limit("speed at the chosen size over the best, least", min(row["share"] for row in speed), 0.97, "min"),
        Limit("tuning over a job of 512 rows, most", max(row["tuning share"] for row in speed), 0.1, "max"),
    ]
    report("tuner_cpu", rows, limits, arguments=arguments, about=" ".join((__doc__ or "").split()))


def study(folder: str, name: str, *, quick: bool) -> list[dict[str, Any]]:
    """All that is asked of a model."""
    speed = speed_row(folder, name, quick=quick)
    return [*(memory_row(folder, name, room) for room in ROOMS[name][: 1 if quick else None]), speed]


def memory_row(folder: str, name: str, room: int) -> dict[str, Any]:
    """What the tuner says fits, and what does."""
    words = [sys.executable, __file__, "--one", "tune", folder, name, str(room)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return {"what": "memory", "model": name, "room MB": room // 10**6, "share": 0.0, "tuner killed": 1}
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    truth = one("fit", folder, name, str(found["budget_bytes"]))
    row = {
        "what": "memory",
        "model": name,
        "room MB": found["budget_bytes"] // 10**6,
        "tuner": found["max_fitting"],
        "truth": truth["rows"],
        "share": round(found["max_fitting"] / truth["rows"], 4),
        "chosen": found["rows"],
        "probes": len(found["probes"]),
        "tuning s": round(found["seconds"], 2),
        "tuner killed": 0,
        "ended by a signal beyond the truth": truth["killed"],
    }
    print(row, flush=True)
    return row


def speed_row(folder: str, name: str, *, quick: bool) -> dict[str, Any]:
    """The chosen size, and the fastest."""
    found = [one("tune", folder, name, "plenty") for _ in range(1 if quick or name == "small" else 3)]
    chosen = statistics.median_low(sorted(size["rows"] for size in found))
    sizes = sorted({*SIZES[name], chosen}) if not quick else sorted({8, 32, chosen})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(1 if quick else ROUNDS[name]):
        for size in sizes:
            seconds[size].append(one("job", folder, name, str(size))["cpu"])
            print(name, size, seconds[size][-1], flush=True)
    median = {size: statistics.median(values) for size, values in seconds.items()}
    best = min(median, key=median.__getitem__)
    spent = statistics.median(size["cpu"] for size in found)
    return {
        "what": "speed",
        "model": name,
        "chosen": chosen,
        "truth": best,
        "share": round(median[best] / median[chosen], 4),
        "probes": len(found[0]["probes"]),
        "tuning CPU s": round(spent, 2),
        "job s": round(median[chosen], 2),
        "tuning share": round(spent / median[chosen], 4),
        "rows/s by size": {str(size): round(512 / value, 2) for size, value in median.items()},
        "chosen in each try": sorted(size["rows"] for size in found),
    }


def one(*words: str) -> dict[str, Any]:
    """A task in a process of its own: the last line it prints."""
    found: dict[str, Any] = json.loads(run_script([__file__, "--one", *words]).splitlines()[-1])
    return found


def load(folder: str, name: str, **trainer: Any) -> Any:
    import torch

    from partita.model import Model

    torch.set_num_threads(1)
    config = {
        "base_model": f"{folder}/{name}",
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "prompt": {"template": "{prompt}", "chat": False},
        "generation": {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
        "trainer": {"type": "none", **trainer},
    }
    model = Model(config, quiet=True)
    model._backend.parts()
    return model


def questions(folder: str) -> list[dict[str, Any]]:
    """The rows without their answers: generation alone is looked at."""
    lines = Path(folder, "rows.jsonl").read_text(encoding="utf8").splitlines()
    return [{"prompt": json.loads(line)["prompt"]} for line in lines]


def held() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf8").split()[1]) * resource.getpagesize()


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf8").splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) * 1024


def tune(folder: str, name: str, room: str) -> dict[str, Any]:
    """The tuner's answer, and the CPU seconds of its search."""
    from partita.pipeline import batch_sizes as sizes

    limits = {} if room == "plenty" else {"memory_budget": held_with_model(folder, name) + int(room)}
    model = load(folder, name, **limits)
    rows = questions(folder)
    search, spent = sizes.tune, []

    def counted(*positional: Any, **named: Any) -> Any:
        started = time.process_time()
        try:
            return search(*positional, **named)
        finally:
            spent.append(time.process_time() - started)

    sizes.tune = counted
    found: dict[str, Any] = model.tune(rows, fresh=True).generation.record()
    return {**found, "cpu": sum(spent)}


def held_with_model(folder: str, name: str) -> int:
    """What a process holds that has the model loaded."""
    return int(one("held", folder, name)["bytes"])


def held_now(folder: str, name: str) -> dict[str, Any]:
    model = load(folder, name)
    model.generate("x", max_new_tokens=2)  # weights are in memory once they have been used
    return {"bytes": held()}


def fit(folder: str, name: str, room: str) -> dict[str, Any]:
    """The largest batch of the longest prompts that truly runs, by bisection over processes."""
    from partita.lm.base import GenerationRequest

    model = load(folder, name)
    pipeline = model._backend.parts()
    prompts = [pipeline.lm.tokenizer(row["prompt"])["input_ids"] for row in questions(folder)]
    longest = max(prompts, key=len)
    chance = random.Random(0)
    killed = 0

    def runs(rows: int) -> bool:
        nonlocal killed
        others = [chance.sample(longest, len(longest)) for _ in range(rows)]  # equal ones would be read once
        requests = [GenerationRequest(ids, NEW_TOKENS) for ids in others]
        child = os.fork()
        if child == 0:
            os._exit(0 if generates(pipeline, requests, int(room)) else 3)
        status = os.waitpid(child, 0)[1]
        killed += os.WIFSIGNALED(status)
        return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0

    model.generate("x", max_new_tokens=2)
    low, high = 0, 1
    while runs(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return {"rows": low, "killed": killed}


def generates(pipeline: Any, requests: list[Any], room: int) -> bool:
    """Whether rows are answered at once with so many bytes more, memory given back as soon as it is free."""
    import ctypes

    from partita.generation.generator import generate_requests
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings
    from partita_schema.errors import PartitaError

    library = ctypes.CDLL(None)
    library.mallopt(-3, 1 << 17)
    library.malloc_trim(0)
    limit = data_bytes() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    held = BatchBudget(len(requests))
    try:
        generate_requests(pipeline.lm, requests, GenerationSettings(pipeline.generation, held, 0))
    except (RuntimeError, MemoryError, PartitaError):
        return False
    return not held.out_of_memory


def job(folder: str, name: str, size: str) -> dict[str, Any]:
    """The whole job at a size."""
    model = load(folder, name)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        cpu = time.process_time()
        stats = model.predict(questions(folder), batch_size=int(size)).stats
        cpu = time.process_time() - cpu
    if stats.ok != stats.rows:
        sys.exit(f"{stats}")
    return {"cpu": cpu}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        tasks = {"tune": tune, "fit": fit, "job": job, "held": held_now}
        print(json.dumps(tasks[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
