"""The batch-size tuner: its search on synthetic memory curves, and its results on a CPU compared with brute force."""

import ctypes
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fixtures import read_rows, zero_shot
from harness import SHARED, Limit, Result, Row, call, command, main, one_thread, run_script

from partita_trainers.batch_size.probe import ProbeResult
from partita_trainers.batch_size.search import largest_fitting, next_rows

MB, GB = 10**6, 10**9
BLOCK = 2 * 2**20
CURVES = 3000
ROOMS = {"tiny": (300_000_000, 500_000_000, 800_000_000), "small": (400_000_000,)}
"""Bytes above the memory of the process with the model loaded."""
SIZES = {"tiny": (16, 32, 64, 96, 128, 192), "small": (48, 96)}
ROUNDS = {"tiny": 3, "small": 1}
NEW_TOKENS = 32


# Search


def search(folder: Path, quick: bool) -> Result:
    """The search for the largest batch that fits, on 3,000 synthetic memory curves, compared with other tools.

    A curve is the memory of a batch by its rows: the largest of one to four phases, each a constant (up to 5 % of the
    free memory) and a slope; rounded up to 2 MB; plus the fragmentation of the allocator, up to 4 % on half of the
    curves and up to 12 % on the others, slightly different at every size. A fifth of the datasets have fewer rows than
    fit. True maxima are between 16 and 16,384 rows. partita may use 98 % of the free memory less 256 MB, as on GPUs;
    the others use all. The others follow their sources: Ludwig doubles until the device runs out of memory; Lightning
    doubles, or doubles and then bisects, up to 25 times; accelerate starts with the 128 of its documentation and
    reduces by a tenth until the batch fits.
    """
    curves = [Curve(number) for number in range(300 if quick else CURVES)]
    rows = [search_row(name, curves, about=f"all {len(curves):,}") for name in METHODS]
    for waste in (0.04, 0.12):
        chosen = [curve for curve in curves if curve.most_waste == waste]
        rows.append(search_row("partita", chosen, about=f"waste up to {waste:.0%}"))
    ours = rows[0]
    limits = [
        Limit("probes, median", ours["probes, median"], 4, "max"),
        Limit("probes, p95", ours["probes, p95"], 5, "max"),
        Limit("out of memory a search", ours["out of memory a search"], 0.01, "max"),
        Limit("share of the true maximum, median", ours["share of the true maximum, median"], 0.97, "min"),
        Limit("share of the true maximum, p5", ours["share, p5"], 0.94, "min"),
    ]
    return rows, limits


class Curve:
    """A device with a model, and the memory of a batch."""

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng([20, number])
        self.number = number
        self.free = float(rng.choice([24, 40, 48, 80, 96, 141])) * GB * (1 - rng.uniform(0.05, 0.6))
        self.most_waste = 0.04 if number % 2 else 0.12
        self.usual_waste = rng.uniform(0, 1)
        wanted = np.exp(rng.uniform(np.log(16), np.log(16_384)))
        phases = int(rng.integers(1, 5))
        self.constants = np.exp(rng.uniform(np.log(0.0005), np.log(0.05), phases)) * self.free
        self.slopes = self.free / wanted * rng.uniform(0.2, 1, phases)
        self.slopes[0] = self.free / wanted
        self.rows = 1 << 20
        fits = self.largest()
        if rng.random() < 0.2:
            self.rows = max(4, int(fits * np.exp(-rng.uniform(0, 2))))
        self.true = min(fits, self.rows)

    def used(self, rows: int) -> int:
        return int(-(-np.max(self.constants + self.slopes * rows) // BLOCK) * BLOCK)

    def taken(self, rows: int, *, wandering: bool = True) -> int:
        wander = np.random.default_rng([self.number, rows]).normal(0, 0.05) if wandering else 0.0
        waste = self.most_waste * float(np.clip(self.usual_waste + wander, 0, 1))
        return int(-(-self.used(rows) * (1 + waste) // BLOCK) * BLOCK)

    def largest(self) -> int:
        low, high = 0, 1 << 20
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.taken(middle, wandering=False) <= self.free else (low, middle)
        return low


@dataclass
class Device:
    """Runs batches and counts them."""

    curve: Curve
    probes: int = 0
    crashes: int = 0

    def run(self, rows: int) -> bool:
        self.probes += 1
        fits = self.curve.taken(rows) <= self.curve.free
        self.crashes += not fits
        return fits


def search_partita(device: Device) -> int:
    curve = device.curve
    budget = int(0.98 * curve.free - 256 * MB)
    probes: list[ProbeResult] = []
    while (rows := next_rows(probes, cap=min(curve.rows, 65_535), budget=budget)) is not None:
        if device.run(rows):
            verdict: Any = "fits" if curve.taken(rows) <= budget else "too large"
            probes.append(ProbeResult(rows, verdict, used_bytes=curve.used(rows), taken_bytes=curve.taken(rows)))
        else:
            probes.append(ProbeResult(rows, "out of memory", used_bytes=None, taken_bytes=None))
    return largest_fitting(probes, cap=curve.rows, budget=budget)


def doubling(device: Device) -> int:
    """Double like Ludwig, without its stop at a fifth of the data."""
    rows = 1
    while rows <= device.curve.rows and device.run(rows):
        rows *= 2
    return rows // 2


def lightning_power(device: Device) -> int:
    rows = 2
    for _ in range(25):
        if rows > device.curve.rows:
            return device.curve.rows
        if not device.run(rows):
            return rows // 2
        rows *= 2
    return rows


def lightning_bisection(device: Device) -> int:
    low, high, rows = 1, None, 2
    for _ in range(25):
        if device.run(rows):
            low = rows
            if high is None and rows >= device.curve.rows:
                return device.curve.rows
            if high is not None and high - low <= 1:
                return rows
            rows = rows * 2 if high is None else (high + low) // 2
        else:
            high = rows
            rows = (high + low) // 2
            if high - low <= 1:
                return rows
    return rows


def accelerate_shrinking(device: Device) -> int:
    rows = 128
    while rows > 0 and not device.run(min(rows, device.curve.rows)):
        rows = int(rows * 0.9)
    return min(rows, device.curve.rows)


METHODS: dict[str, Callable[[Device], int]] = {
    "partita": search_partita,
    "doubling (Ludwig)": doubling,
    "power (Lightning)": lightning_power,
    "bisection (Lightning)": lightning_bisection,
    "shrinking from 128 (accelerate)": accelerate_shrinking,
}


def search_row(name: str, curves: list[Curve], *, about: str) -> dict[str, Any]:
    devices = [Device(curve) for curve in curves]
    shares = [METHODS[name](device) / device.curve.true for device in devices]
    probes = [device.probes for device in devices]
    return {
        "search": name,
        "curves": about,
        "probes, median": float(np.median(probes)),
        "probes, p95": float(np.percentile(probes, 95)),
        "out of memory a search": round(sum(device.crashes for device in devices) / len(devices), 4),
        "share of the true maximum, median": round(float(np.median(shares)), 4),
        "share, p5": round(float(np.percentile(shares, 5)), 4),
        "answers that do not fit": sum(
            device.curve.taken(round(share * device.curve.true)) > device.curve.free
            for device, share in zip(devices, shares, strict=True)
        ),
    }


# On a CPU


def cpu(folder: Path, quick: bool) -> Result:
    """The tuner on a CPU compared with brute force: the largest size that fits, the fastest size, and the search time.

    Needs the shared folder next to the repository. Zero-shot prediction of 512 rows of skewed lengths, 32 new tokens,
    fp32, a single thread, in slots. Memory: for several values of memory_budget, the largest number of the longest
    prompts that can be answered at once, with all tokens, under a system limit on the data of the process
    (RLIMIT_DATA), each size in a separate process, compared with the tuner's result. Speed: the CPU seconds of the
    whole job at many sizes, in turn, compared with the size that the tuner chooses with plenty of memory; and the CPU
    seconds of the search relative to those of the job.
    """
    run_script([SHARED / "peers" / "workload.py", folder])

    def study(name: str) -> list[Row]:
        speed = speed_row(folder, name, quick=quick)
        return [*(memory_row(folder, name, room) for room in ROOMS[name][: 1 if quick else None]), speed]

    names = ["tiny"] if quick else ["tiny", "small"]
    with ThreadPoolExecutor(len(names)) as pool:  # each uses separate processes on a separate core
        rows = [row for found in pool.map(study, names) for row in found]
    memory = [row for row in rows if row["what"] == "memory"]
    speed = [row for row in rows if row["what"] == "speed"]
    limits = [
        Limit("share of what truly fits, least", min(row["share"] for row in memory), 0.94, "min"),
        Limit("share of what truly fits, most", max(row["share"] for row in memory), 1.0, "max"),
        Limit("processes of the tuner that a signal ended", sum(row["tuner killed"] for row in memory), 0, "max"),
        Limit("speed at the chosen size over the best, least", min(row["share"] for row in speed), 0.97, "min"),
        Limit("tuning over a job of 512 rows, most", max(row["tuning share"] for row in speed), 0.1, "max"),
    ]
    return rows, limits


def memory_row(folder: Path, name: str, room: int) -> Row:
    """Return the tuner's result and the true maximum."""
    words = command(tune, folder, name, room)
    done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return {"what": "memory", "model": name, "room MB": room // 10**6, "share": 0.0, "tuner killed": 1}
    if done.returncode:
        sys.exit(done.stderr)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    truth = call(fit, folder, name, found["budget_bytes"])
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


def speed_row(folder: Path, name: str, *, quick: bool) -> Row:
    """Return the chosen size and the fastest one."""
    found = [call(tune, folder, name) for _ in range(1 if quick or name == "small" else 3)]
    chosen = statistics.median_low(sorted(size["rows"] for size in found))
    sizes = sorted({*SIZES[name], chosen}) if not quick else sorted({8, 32, chosen})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(1 if quick else ROUNDS[name]):
        for size in sizes:
            seconds[size].append(call(job, folder, name, size))
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


def load(folder: str, name: str, **trainer: Any) -> Any:
    import torch

    from partita.model import Model

    torch.set_num_threads(1)
    prompt = {"template": "{prompt}", "chat": False}
    config = zero_shot(f"{folder}/{name}", "prompt response", tokens=NEW_TOKENS, prompt=prompt, trainer=trainer)
    config["generation"]["min_new_tokens"] = NEW_TOKENS
    model = Model(config, quiet=True)
    model._backend.pipeline()
    return model


def questions(folder: str) -> list[Row]:
    """Return the rows without their answers: only generation is measured."""
    return [{"prompt": row["prompt"]} for row in read_rows(Path(folder, "rows.jsonl"))]


def data_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf8").splitlines()
    return int(next(line for line in lines if line.startswith("VmData")).split()[1]) * 1024


def tune(folder: str, name: str, room: int | None = None) -> Row:
    """Return the tuner's result, and the CPU seconds of its search."""
    from partita.pipeline import batch_sizes as sizes

    limits = {} if room is None else {"memory_budget": call(resident_bytes, folder, name) + room}
    model = load(folder, name, **limits)
    rows = questions(folder)
    find, spent = sizes.tune, []

    def counted(*positional: Any, **named: Any) -> Any:
        started = time.process_time()
        try:
            return find(*positional, **named)
        finally:
            spent.append(time.process_time() - started)

    sizes.tune = counted
    found: Row = model.tune(rows, fresh=True).generation.record()
    return {**found, "cpu": sum(spent)}


def resident_bytes(folder: str, name: str) -> int:
    """Return the memory of a process with the model loaded."""
    model = load(folder, name)
    model.generate("x", max_new_tokens=2)  # weights are resident in memory after their first use
    return int(Path("/proc/self/statm").read_text(encoding="utf8").split()[1]) * resource.getpagesize()


def fit(folder: str, name: str, room: int) -> Row:
    """Find the largest batch of the longest prompts that runs, by bisection over processes."""
    from partita.lm.base import GenerationRequest

    model = load(folder, name)
    pipeline = model._backend.pipeline()
    prompts = [pipeline.lm.tokenizer(row["prompt"])["input_ids"] for row in questions(folder)]
    longest = max(prompts, key=len)
    rng = random.Random(0)
    killed = 0

    def runs(rows: int) -> bool:
        nonlocal killed
        others = [rng.sample(longest, len(longest)) for _ in range(rows)]  # equal prompts would be computed once
        requests = [GenerationRequest(ids, NEW_TOKENS) for ids in others]
        child = os.fork()
        if child == 0:
            os._exit(0 if generates(pipeline, requests, room) else 3)
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
    """Return whether rows can be answered at once in `room` more bytes; freed memory returns to the system at once."""
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


def job(folder: str, name: str, size: int) -> float:
    """Return the CPU seconds of the whole job with a batch size."""
    model = load(folder, name)
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        started = time.process_time()
        stats = model.predict(questions(folder), batch_size=size).stats
        seconds = time.process_time() - started
    if stats.ok != stats.rows:
        sys.exit(f"{stats}")
    return seconds


if __name__ == "__main__":
    main(search, cpu)
