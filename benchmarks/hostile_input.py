"""2,000 mutated configurations and 2,000 mutated data files: rows or an error message, in little time and memory.

Each configuration goes through `partita validate`. A valid one also goes through `partita explain` and `partita
preview`. Each data file is read twice: by index, where a model with fixed answers predicts its rows, and as a stream.

Every input is handled in a process of its own. Time is CPU time without the imports; a data file may take 0.3 ms more
for each row that is answered. Memory is what an input adds to that of the imports. CSV files with broken quotes are
read at three sizes, which shows whether time is linear in size. The mutations are those of tests/hostile, with another
seed.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from harness import ROOT, Limit, about, parse_arguments, report

from partita.data.sources.csv_reader import read_csv

SEED = 4
PART = 100
"""Mutations of one program, so that progress is seen."""
SECONDS_A_ROW = 0.0003
"""CPU seconds for which a good row is encoded, answered, recorded and written."""
BROKEN_QUOTES = {"shifted": 'x","y"\n"', "never closed": '"x\n', "closed too late": '"x\ny"z\n', "escaped": '"""\n'}
"""Lines that are repeated."""
MEGABYTES = (0.25, 0.5, 1.0)


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 100 if arguments.quick else 2000
    found = {kind: outcomes(kind, count) for kind in ("configs", "data")}
    rows = [row(kind, cases) for kind, cases in found.items()]
    quotes = {name: [seconds_of(line, size) for size in MEGABYTES] for name, line in BROKEN_QUOTES.items()}
    cases = [case for kind in found.values() for case in kind]
    limits = [
        Limit("mutated configurations", len(found["configs"]), count, "min"),
        Limit("mutated data files", len(found["data"]), count, "min"),
        Limit(
            "tracebacks, wrong exit statuses and killed processes", sum("traceback" in case for case in cases), 0, "max"
        ),
        Limit("rows unaccounted for", sum(case.get("unaccounted", 0) for case in cases), 0, "max"),
        Limit("most CPU seconds of one input, without its answers", max(map(seconds_of_reading, cases)), 5, "max"),
        Limit("most megabytes added by one input", max(case["megabytes"] for case in cases), 500, "max"),
        Limit("CPU seconds of 1 MB of broken quotes", max(times[-1] for times in quotes.values()), 2, "max"),
        Limit(
            "CPU seconds of 1 MB over those of 0.25 MB",
            max(times[-1] / times[0] for times in quotes.values()),
            6,
            "max",
        ),
    ]
    rows += [quote_row(name, times) for name, times in quotes.items()]
    report("hostile_input", rows, limits, arguments=arguments, about=about(__doc__))


def outcomes(kind: str, count: int) -> list[dict[str, Any]]:
    """What became of mutations; those that break a promise are printed."""
    found = []
    for first in range(0, count, PART):
        with tempfile.TemporaryDirectory() as folder:
            found += outcomes_of_part(kind, first, min(first + PART, count), folder)
        print(f"{kind}: {len(found):,} of {count:,}", flush=True)
    return found


def outcomes_of_part(kind: str, first: int, last: int, folder: str) -> list[dict[str, Any]]:
    home = ROOT / "tests" / "hostile"
    words = [sys.executable, home / "program.py", kind, home, SEED, first, last]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PARTITA_CACHE": f"{folder}/cache",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    for case in cases:
        if "traceback" in case or case.get("unaccounted") or seconds_of_reading(case) > 5 or case["megabytes"] > 500:
            print(json.dumps(case), flush=True)
    return cases


def seconds_of_reading(case: dict[str, Any]) -> float:
    """CPU seconds of an input, less what its answers may take."""
    return float(case["seconds"] - SECONDS_A_ROW * case.get("rows", 0))


def row(kind: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table."""
    seconds = sorted(case["seconds"] for case in cases)
    return {
        "input": kind,
        "inputs": len(cases),
        "read": sum(case.get("outcome") in ("good", "answered") for case in cases),
        "refused": sum(case.get("outcome") == "refused" for case in cases),
        "tracebacks": sum("traceback" in case for case in cases),
        "CPU s, median": seconds[len(seconds) // 2],
        "CPU s, most": seconds[-1],
        "MB, most": max(case["megabytes"] for case in cases),
    }


def quote_row(name: str, times: list[float]) -> dict[str, Any]:
    named = {f"CPU s, {size:g} MB": seconds for size, seconds in zip(MEGABYTES, times, strict=True)}
    return {"input": f"quotes: {name}", **named}


def seconds_of(line: str, megabytes: float) -> float:
    """CPU seconds of reading a CSV file of a repeated line; the least of three times."""
    head = 'question,answer\n"'
    data = (head + line * (int(megabytes * 1_000_000) // len(line))).encode()
    found = []
    for _ in range(3):
        begun = time.process_time()
        for _ in read_csv(io.BytesIO(data), "rows.csv"):
            pass
        found.append(time.process_time() - begun)
    return min(found)


if __name__ == "__main__":
    main()
