"""Memory of a stream over three epochs, and what a SIGKILL leaves behind; with --large, 5 GB under 1 GB.

A window of 8,192 rows and two workers, beside `datasets` with a shuffle buffer of as many rows. A row of about 4 KB has
a question and an answer of about 200 tokens and a document of 3 KB that the model is not shown. Memory is that of the
process and of all it started, shared pages counted once, sampled five times a second; nothing is learned, every batch
is made. Then a run is killed with SIGKILL in its middle, and a second one goes on from its position.

--large: one epoch over 5 GB of such rows in 16 files, tokens counted, killed and resumed at half; no peer.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Limit, about, parse_arguments, report
from workloads_data import an_epoch, make_model, settings, shard_names, tree_memory, with_batches, words

WINDOW, ROWS_OF_A_BATCH, EPOCHS = 8192, 32, 3
SHARED_MEMORY = Path("/dev/shm")
WAIT_FROM = "DATA_MEMORY_WAIT_FROM"
"""Environment variable: rows after which a process waits to be killed."""
MOST_BYTES = 10**9
LARGE_BYTES = 5 * 10**9
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "", flags={"large": "5 GB, in place of three epochs of less"})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        if arguments.large:
            rows, limits = large(folder, quick=arguments.quick)
        else:
            rows, limits = three_epochs(folder, quick=arguments.quick)
    stem = "data_memory_large" if arguments.large else "data_memory"
    report(stem, rows, limits, arguments=arguments, about=about(__doc__))


def three_epochs(folder: Path, *, quick: bool) -> tuple[list[Row], list[Limit]]:
    wanted, window = (10**7, 1024) if quick else (16 * 10**7, WINDOW)
    count = write_documents(folder / "shards", wanted, shards=4)
    words_of = ["--one", folder, count, window, EPOCHS]
    ours, peer = watch([*words_of, "partita"]), watch([*words_of, "datasets"])
    leftovers, resumed = killed(folder, [*words_of, "partita"], count=count)
    rows = [
        {"stream": name, "data MB": wanted // 10**6, **in_megabytes(found)}
        for name, found in (("partita", ours), ("datasets, shuffle buffer", peer))
    ]
    rows.append({"stream": "partita, killed and resumed", **resumed})
    limits = [
        Limit("MB that the third epoch takes more than the first", slope(ours) // 10**6, 20, "max"),
        Limit("processes and files in shared memory left behind by SIGKILL", leftovers, 0, "max"),
        Limit("rows lost or doubled by SIGKILL", resumed["lost"] + resumed["doubled"], 0, "max"),
    ]
    return rows, limits


def large(folder: Path, *, quick: bool) -> tuple[list[Row], list[Limit]]:
    wanted = 2 * 10**8 if quick else LARGE_BYTES
    count = write_documents(folder / "shards", wanted, shards=16)
    arguments = ["--one", folder, count, WINDOW, 1, "partita"]
    started = time.perf_counter()
    first = watch(arguments, kill_behind=count // 2)
    second = watch(arguments)
    seconds = time.perf_counter() - started
    lost, doubled = compare_keys(folder, count)
    most = max(first["peak"], second["peak"])
    rows = [
        {
            "stream": "partita, killed at half and resumed",
            "data MB": wanted // 10**6,
            "rows": count,
            "tokens": second["tokens"],
            "seconds": round(seconds),
            "MB a second": round(wanted / seconds / 10**6, 1),
            "peak MB": most // 10**6,
            "lost": lost,
            "doubled": doubled,
        }
    ]
    limits = [
        Limit("most MB of memory, workers included", most // 10**6, MOST_BYTES // 10**6, "max"),
        Limit("rows lost or doubled", lost + doubled, 0, "max"),
    ]
    return rows, limits


def write_documents(folder: Path, wanted: int, *, shards: int) -> int:
    """Number of rows in files of so many bytes together, and a little more."""
    chance = random.Random(3)
    pieces = [words(chance, 20) for _ in range(2000)]
    document = words(chance, 1000)[:3000]
    folder.mkdir()
    written = number = 0
    for place, path in enumerate(shard_names(folder, shards), start=1):
        with path.open("w", encoding="utf8") as file:
            while written < wanted * place // shards:
                row = {
                    "number": number,
                    "premise": " ".join(chance.choices(pieces, k=chance.randint(2, 8))),
                    "claim": chance.choice(pieces),
                    "label": pieces[number % 50][:12],
                    "document": document,
                }
                written += file.write(json.dumps(row) + "\n")
                number += 1
    return number


def watch(arguments: list[Any], *, kill_behind: int | None = None) -> Row:
    """What a process of its own reports, with the most memory it took in each epoch; `kill_behind` so many rows it is
    killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if kill_behind is not None:
        environment[WAIT_FROM] = str(kill_behind)  # however fast it is, it cannot end first
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
    )
    state = Path(arguments[1]) / f"{arguments[-1]}.state"
    peaks: dict[int, int] = {}
    while process.poll() is None:
        at = json.loads(state.read_text()) if state.is_file() else None
        if at is not None and at["process"] == process.pid:
            peaks[at["epoch"]] = max(peaks.get(at["epoch"], 0), tree_memory(process.pid))
            if kill_behind is not None and at["rows"] >= kill_behind:
                process.send_signal(signal.SIGKILL)
                process.wait()
        time.sleep(0.2 if kill_behind is None else 0.05)
    told = process.stdout.read() if process.stdout is not None else ""
    if process.returncode != (0 if kill_behind is None else -signal.SIGKILL):
        sys.exit(f"{arguments} ended with {process.returncode}")
    found: Row = json.loads(told.splitlines()[-1]) if kill_behind is None else {}
    return found | {"peaks": [peaks[epoch] for epoch in sorted(peaks)], "peak": max(peaks.values(), default=0)}


def slope(found: Row) -> int:
    return int(found["peaks"][-1] - found["peaks"][0])


def in_megabytes(found: Row) -> Row:
    peaks = {f"epoch {number} MB": peak // 10**6 for number, peak in enumerate(found["peaks"], start=1)}
    return {"rows": found["rows"], "seconds": found["seconds"], **peaks, "growth MB": slope(found) // 10**6}


def killed(folder: Path, arguments: list[Any], *, count: int) -> tuple[int, Row]:
    """What is left of a run that is killed in the middle of its first epoch, and what the next one makes of it."""
    for path in folder.glob("partita*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    arguments = [*arguments[:4], 1, *arguments[5:]]
    watch(arguments, kill_behind=count // 2)
    time.sleep(2)
    left = (set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()) - before
    left_processes = workers_of(folder)
    again = watch(arguments)
    lost, doubled = compare_keys(folder, count)
    return len(left) + left_processes, {"rows": again["rows"], "lost": lost, "doubled": doubled}


def workers_of(folder: Path) -> int:
    """Processes that were started to read these rows and still live."""
    import psutil

    found = 0
    for process in psutil.process_iter():
        try:
            found += str(folder) in process.cmdline() and process.pid != os.getpid()
        except psutil.Error:
            continue
    return found


def compare_keys(folder: Path, count: int) -> tuple[int, int]:
    """Rows that no attempt used, and those used again, where each attempt counts up to the position it saved."""
    keys = (folder / "partita.keys").read_text().splitlines()
    return count - len(set(keys)), len(keys) - len(set(keys))


def one(folder: Path, count: int, window: int, epochs: int, contender: str) -> None:
    """Batches of so many epochs, or what an earlier process has left of them; prints a line of JSON."""
    told = {"partita": ours, "datasets": of_datasets}[contender](folder, count, window, epochs)
    print(json.dumps(told))


def reporter(folder: Path, contender: str) -> Callable[[int, int], None]:
    """Says where a process is, for the one that watches it; from `WAIT_FROM` rows on it waits there to be killed."""
    state, last, wait_from = folder / f"{contender}.state", [0.0], int(os.environ.get(WAIT_FROM, 0))

    def tell(epoch: int, rows: int) -> None:
        while wait_from and rows >= wait_from:
            last[0] = 0.0
            write(epoch, rows)
            time.sleep(0.05)
        write(epoch, rows)

    def write(epoch: int, rows: int) -> None:
        if time.perf_counter() - last[0] > 0.1:
            last[0] = time.perf_counter()
            beside = state.with_suffix(".new")
            beside.write_text(json.dumps({"process": os.getpid(), "epoch": epoch, "rows": rows}))
            beside.rename(state)

    return tell


def ours(folder: Path, count: int, window: int, epochs: int) -> Row:
    """All rows of a stream; with one epoch, from the position that an earlier process has saved last."""
    data = {
        "source": {"type": "jsonl", "path": str(folder / "shards" / "part-*.jsonl"), "streaming": True},
        "batching": {"type": "bucket", "window": window},
        "loader": {"workers": 2},
    }
    tell = reporter(folder, "partita")
    cursor, found = folder / "partita.cursor", {"rows": 0, "tokens": 0, "bytes": 0}

    def consume(batches: Any) -> None:
        started = time.perf_counter()
        if cursor.is_file():
            saved = json.loads(cursor.read_text())
            batches.load_state_dict(saved["cursor"])
            found.update(saved["found"])
        with (folder / "partita.keys").open("a", encoding="utf8") as file:
            file.truncate(found["bytes"])
            for number, step in enumerate(an_epoch(batches, epochs * count - found["rows"]), start=1):
                keys = [key for batch in step.micro_batches for key in batch.keys]
                found["rows"] += len(keys)
                found["tokens"] += sum(batch.tokens for batch in step.micro_batches)
                tell((found["rows"] - 1) // count, found["rows"])
                found["bytes"] += file.write("".join(key + "\n" for key in keys))
                if epochs == 1 and number % 10 == 0:
                    file.flush()
                    save(cursor, {"cursor": step.state_dict, "found": found})
        found["seconds"] = round(time.perf_counter() - started, 1)

    config = settings(folder / "model", data, max_steps=10**9)
    with_batches(config, consume, run=Path(tempfile.mkdtemp(dir=folder)) / "run")
    return found


def save(path: Path, value: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def of_datasets(folder: Path, count: int, window: int, epochs: int) -> Row:
    import peers_data as peers
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    stream = peers.datasets_stream(shard_names(folder / "shards", 4), tokenizer, buffer=window)

    def padded(rows: list[Row]) -> Any:
        return peers.pad([row["input_ids"] for row in rows])

    tell, started, rows = reporter(folder, "datasets"), time.perf_counter(), 0
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=ROWS_OF_A_BATCH, num_workers=2, collate_fn=padded):
            rows += len(batch["input_ids"])
            tell(epoch, rows)
    return {"rows": rows, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
