"""Memory of `predict` beside the number of rows, a process each.

A row has a question, a number and 500 further characters that the model is not shown. 5,000 and 50,000 rows go through
a model of 0.1 M parameters and have answers of at most four tokens, so that rows and not arithmetic are measured;
20,000 and 200,000 through one of 5 M with 16 new tokens each, to see what share of a job is neither reading prompts nor
making answers: reading rows, encoding, journal, output file. One thread; peak resident memory of the whole process,
with the pages of mapped files in it.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Limit, parse_arguments, report

CONFIG: dict[str, Any] = {
    "base_model": {"type": "scratch", "size": "nano", "tokenizer": "word", "vocab_size": 256, "context_length": 64},
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "generation": {"max_new_tokens": 4},
    "data": {"source": "small.jsonl"},
    "trainer": {"type": "none", "batch_size": 256},
}


LARGER: dict[str, Any] = {
    **CONFIG,
    "base_model": CONFIG["base_model"] | {"size": "mini"},
    "generation": {"max_new_tokens": 16, "min_new_tokens": 16},
}
SOME, MANY = 20_000, 200_000
"""Rows that go through the larger model."""


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    sizes = (1000, 10_000) if arguments.quick else (5000, 50_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "small.jsonl", 500)
        rows = [measure(folder, size) for size in (*sizes, *(() if arguments.quick else (SOME, MANY)))]
    grown = rows[1]["peak MB"] - rows[0]["peak MB"]
    limits = [Limit(f"MB that {sizes[1]:,} rows take more than {sizes[0]:,}", grown, 100, "max")]
    if not arguments.quick:
        more = rows[3]["peak MB"] - rows[2]["peak MB"]
        limits.append(Limit(f"MB that {MANY:,} rows take more than {SOME:,}", more, 100, "max"))
        limits.append(Limit(f"share of {MANY:,} rows that is not the model's", rows[3]["not the model's"], 0.05, "max"))
    report(
        "predict_memory", rows, limits, arguments=arguments, about=" ".join((__doc__ or "").split("\n\n", 1)[0].split())
    )


def write_rows(path: Path, count: int) -> None:
    chance = random.Random(1)
    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
    with path.open("w", encoding="utf8") as file:
        for number in range(count):
            question = " ".join(chance.choices(words, k=chance.randint(3, 20)))
            row = {"number": number, "question": question, "answer": words[number % 60], "note": "." * 500}
            file.write(json.dumps(row) + "\n")


def measure(folder: Path, count: int) -> dict[str, Any]:
    """A row of the table: predictions of so many rows, in a process of their own."""
    write_rows(folder / f"{count}.jsonl", count)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, str(Path(__file__).resolve()), "--one", str(count)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def one(count: int) -> None:
    """Predictions of so many rows of the current folder; prints a line of JSON."""
    from partita.model import Model

    model = Model(LARGER if count in (SOME, MANY) else CONFIG, quiet=True)
    model._backend.parts()
    started = time.perf_counter()
    stats = model.predict(f"{count}.jsonl", output=f"out{count}.jsonl").stats
    seconds = time.perf_counter() - started
    with Path(f"out{count}.jsonl").open("rb") as file:
        written = sum(1 for _ in file)
    assert written == stats.rows == count
    print(
        json.dumps(
            {
                "rows": count,
                "answered": stats.ok,
                "seconds": round(seconds, 1),
                "rows a second": round(count / seconds),
                "not the model's": round(1 - (stats.prefill_seconds + stats.decode_seconds) / seconds, 4),
                "MB written": round(Path(f"out{count}.jsonl").stat().st_size / 2**20, 1),
                "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(int(sys.argv[2]))
    else:
        main()
