"""Cases that make loaders hang, repeat or drop rows, beside accelerate's dispatch of batches on two processes.

Four ranks, 1,003 SNLI-like rows, streamed, four batches of 8 a step: a number of rows that no rank count divides; two
compressed files for four lanes; one row a hundred times as long as the others; ten broken rows (no JSON, not UTF-8, no
column, a wrong type). partita's ranks live in one process, as those of data_ranks. The peer's rows are those that both
of its processes were handed together; without a sign of life for 20 seconds it counts as hung.
"""

import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_data as peers
from data_ranks import job, remember_arguments
from harness import Limit, about, parse_arguments, report
from workloads_data import LONGEST, WORDS, make_model, settings, snli_rows, spending, with_batches

RANKS, ROWS_OF_A_BATCH, PATIENCE = 4, 8, 20
BROKEN = (b'{"number": ', b'{"number": 1, "premise": "\xff\xfe", "claim": "a", "label": "b"}', b'{"number": 1}', b"[1]")
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 203 if arguments.quick else 1003
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        patterns: dict[str, str] = {}
        broken: dict[str, int] = {}
        for number, (case, make) in enumerate(CASES.items()):
            place = folder / f"case-{number}"
            place.mkdir()
            patterns[case], broken[case] = make(place, list(snli_rows(count)))
            found = ours(place, model, patterns[case], broken[case], count)
            table.append({"case": case, "loader": "partita, 4 ranks", **found})
        for case, row in of_accelerate(folder, model, patterns, count).items():
            table.append({"case": case, "loader": "accelerate, 2 processes", "broken": broken[case], **row})
    mine = [row for row in table if row["loader"].startswith("partita")]
    limits = [
        Limit("cases that end", sum(row["end"] == "ended" for row in mine), len(CASES), "min"),
        Limit("good rows lost or doubled", sum(row["lost"] + row["doubled"] for row in mine), 0, "max"),
        Limit("broken rows that were not counted", sum(row["broken"] - row["counted"] for row in mine), 0, "max"),
    ]
    report("data_hard_cases", table, limits, arguments=arguments, about=about(__doc__))


def uneven(folder: Path, rows: list[Row]) -> tuple[str, int]:
    return write(folder, rows, files=4), 0


def few_shards(folder: Path, rows: list[Row]) -> tuple[str, int]:
    """Compressed files cannot be cut."""
    for number in range(2):
        with gzip.open(folder / f"part-{number}.jsonl.gz", "wt", encoding="utf8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows[number::2])
    return str(folder / "part-*.jsonl.gz"), 0


def long_row(folder: Path, rows: list[Row]) -> tuple[str, int]:
    rows[len(rows) // 2]["premise"] = " ".join(WORDS[:10] * 80)
    return write(folder, rows, files=4), 0


def broken_rows(folder: Path, rows: list[Row]) -> tuple[str, int]:
    """The same good rows, with broken ones among them."""
    broken = max(1, len(rows) // 100)
    pattern = write(folder, rows, files=4)
    for number in range(broken):
        path = folder / f"part-{number % 4}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines.insert(len(lines) // 2, BROKEN[number % len(BROKEN)] + b"\n")
        path.write_bytes(b"".join(lines))
    return pattern, broken


CASES: dict[str, Callable[[Path, list[Row]], tuple[str, int]]] = {
    "rows % ranks != 0": uneven,
    "fewer shards than lanes": few_shards,
    "one row 100 times as long": long_row,
    "1 % broken rows": broken_rows,
}


def write(folder: Path, rows: list[Row], *, files: int) -> str:
    for number in range(files):
        lines = [json.dumps(row) + "\n" for row in rows[number::files]]
        (folder / f"part-{number}.jsonl").write_text("".join(lines), encoding="utf8")
    return str(folder / "part-*.jsonl")


def ours(folder: Path, model: Path, pattern: str, broken: int, count: int) -> Row:
    data = {
        "source": {"type": "jsonl", "path": pattern, "streaming": True},
        "batching": {"type": "token_budget", "max_tokens": LONGEST, "max_rows": ROWS_OF_A_BATCH, "window": 64},
        "max_bad_rows": 0.05,
    }
    config = settings(model, data, max_steps=10**6, gradient_accumulation_steps=RANKS)
    del config["trainer"]["batch_size"]
    config["preprocessing"] = {"global_max_sequence_length": LONGEST}
    found: Row = {}

    def consume(batches: Any) -> None:
        ledgers: list[Any] = []
        with spending() as spent:
            keys: list[str] = []
            steps = 0
            for _, _, part in job(batches, ranks=RANKS, workers=0, cursor=None, ledgers=ledgers):
                keys += part
                steps += 1
                if len(keys) >= count:
                    break
        seen = Counter(keys)
        counted = ledgers[0].splits["training"].left_out
        found.update(
            end="ended",
            steps=steps,
            lost=count - len(seen),
            doubled=seen.total() - len(seen),
            broken=broken,
            counted=counted,
            **{"CPU s": round(spent.cpu, 2)},
        )

    with_batches(config, consume, run=folder / "run")
    return found


def of_accelerate(folder: Path, model: Path, patterns: dict[str, str], count: int) -> dict[str, Row]:
    """Rows that two processes were handed together, and how it ended, by case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}
    outputs = [folder / f"rank-{rank}.jsonl" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(model), json.dumps(patterns), str(output)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank, output in enumerate(outputs)
    ]
    last, known = time.monotonic(), 0
    while any(process.poll() is None for process in processes):
        size = sum(path.stat().st_size for path in outputs if path.is_file())
        if size != known:
            last, known = time.monotonic(), size
        if known and time.monotonic() - last > PATIENCE:
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()
    events = [json.loads(line) for path in outputs for line in path.read_text().splitlines()]
    return {case: outcome([event for event in events if event["case"] == case], count) for case in patterns}


def outcome(events: list[Row], count: int) -> Row:
    numbers = Counter(number for event in events for number in event.get("rows", ()))
    ends = [event["end"] for event in events if "end" in event]
    hung = ["hung"] if len(ends) < 2 else []
    end = ", ".join([*sorted(set(ends) - {"ended"}), *hung]) or "ended"
    return {"end": end, "lost": count - len(numbers), "doubled": numbers.total() - len(numbers)}


def dispatched(model: Path, patterns: dict[str, str], output: Path) -> None:
    """One process of the peer: writes down the rows that it is handed of each case."""
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from datasets import load_dataset
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def padded(rows: list[Row]) -> Any:
        # Batches of different widths are put together: all are as wide as the longest row.
        batch = peers.pad([*(row["input_ids"] for row in rows), [0] * LONGEST])
        return {"input_ids": batch["input_ids"][:-1], "number": torch.tensor([row["number"] for row in rows])}

    with output.open("w", encoding="utf8", buffering=1) as file:
        for case, pattern in patterns.items():
            try:
                stream = load_dataset("json", data_files=pattern, split="train", streaming=True)
                stream = stream.map(lambda row: {"input_ids": peers.encode(row, tokenizer)[:LONGEST]})
                loader = DataLoader(stream, batch_size=ROWS_OF_A_BATCH, collate_fn=padded)
                for batch in accelerator.prepare(loader):
                    file.write(json.dumps({"case": case, "rows": batch["number"].tolist()}) + "\n")
                file.write(json.dumps({"case": case, "end": "ended"}) + "\n")
            except Exception as error:
                file.write(json.dumps({"case": case, "end": type(error).__name__}) + "\n")
                raise


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        dispatched(Path(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
    else:
        remember_arguments()
        main()
