"""Rows a second of `predict` on 2 processes of one thread each, beside one process of one thread.

A model of 5 M parameters answers 2,048 rows with up to 32 new tokens, in 64 slots a process. Time is that of the whole
call, from reading rows to the file of answers, with the model in memory and the batch size given; medians of five, the
two by turns. A process that only multiplies runs beside a second one as well: what two of them reach together is what
the machine can give.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from forked import import_all, run_ranks
from harness import SHARED, Limit, about, parse_arguments, report, run_script

Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    rounds, copies = (1, 1) if arguments.quick else (5, 4)
    import_all()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_script([SHARED / "peers" / "workload.py", folder])
        texts = [json.loads(line)["prompt"] for line in (folder / "rows.jsonl").read_text(encoding="utf8").splitlines()]
        with (folder / "many.jsonl").open("w", encoding="utf8") as file:
            for copy in range(copies):
                # No two alike: equal prompts would be answered once.
                file.writelines(json.dumps({"prompt": f"{text} {copy}"}) + "\n" for text in texts)
        count = copies * len(texts)
        seconds: dict[int, list[float]] = {1: [], 2: []}
        multiplied: dict[int, list[float]] = {1: [], 2: []}
        for number in range(rounds):
            for ranks in (1, 2):
                seconds[ranks].append(timed(folder, ranks, number))
                multiplied[ranks].append(products(folder, ranks))
        same = len({path.read_bytes() for path in folder.glob("out-*.jsonl")}) == 1
    rates = {ranks: count / statistics.median(times) for ranks, times in seconds.items()}
    roof = statistics.median(multiplied[2]) / statistics.median(multiplied[1])
    table = [
        {
            "processes": ranks,
            "rows": count,
            "seconds": round(statistics.median(times), 2),
            "rows a second": round(rates[ranks], 1),
            "GFLOP/s of products alone, together": round(statistics.median(multiplied[ranks]), 1),
        }
        for ranks, times in seconds.items()
    ]
    limits = [
        Limit("rows a second of 2 processes over 1", round(rates[2] / rates[1], 3), 1.8, "min"),
        Limit("the same over what 2 processes of products reach", round(rates[2] / rates[1] / roof, 3), 0.9, "min"),
        Limit("the same answers", float(same), 1, "min"),
    ]
    report("distributed_predict", table, limits, arguments=arguments, about=about(__doc__))


def timed(folder: Path, ranks: int, number: int) -> float:
    """Seconds of a prediction, on rank 0, whose call ends when all have."""
    config = {
        "base_model": str(folder / "tiny"),
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "generation": {"max_new_tokens": 32},
        "trainer": {"type": "none"},
    }

    def work(rank: int) -> None:
        from partita.model import Model

        os.chdir(folder)
        model = Model(config, quiet=True)
        model._backend.parts()
        model._backend.context.process_group.all_gather_object(None, "ready")
        started = time.perf_counter()
        model.predict("many.jsonl", output=f"out-{ranks}-{number}.jsonl", batch_size=64, fresh=True)
        if rank == 0:
            Path("seconds").write_text(str(time.perf_counter() - started), encoding="utf8")

    if any(run_ranks(ranks, work, folder=folder).status):
        raise SystemExit("a rank failed")
    return float((folder / "seconds").read_text(encoding="utf8"))


def products(folder: Path, ranks: int) -> float:
    """GFLOP/s that so many processes reach together, each multiplying matrices for a second."""

    def work(rank: int) -> None:
        import torch

        a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
        done, end = 0, time.perf_counter() + 1
        while time.perf_counter() < end:
            torch.matmul(a, b)
            done += 1
        (folder / f"products-{rank}").write_text(str(done * 2 * 256 * 1024 * 1024 / 1e9), encoding="utf8")

    run_ranks(ranks, work, folder=folder)
    return sum(float((folder / f"products-{rank}").read_text(encoding="utf8")) for rank in range(ranks))


if __name__ == "__main__":
    main()
