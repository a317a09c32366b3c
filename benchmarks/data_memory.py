"""Memory of the data layer: it does not grow with streams and dialogues, and nothing is left after a SIGKILL."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
from fixtures import (
    an_epoch,
    make_model,
    settings,
    shard_names,
    spending,
    tree_memory,
    with_batches,
    words,
    write_shards,
)
from harness import Limit, Result, Row, call, command, main, one_thread

WINDOW, EPOCHS = 8192, 3
SHARED_MEMORY = Path("/dev/shm")
WAIT_FROM = "DATA_MEMORY_WAIT_FROM"
"""Environment variable: number of rows after which a process waits to be killed."""
MOST_BYTES = 10**9
LARGE_BYTES = 5 * 10**9
GOLDEN: dict[str, tuple[Row, list[str]]] = {
    "no labels, all": ({"include_labels": False}, ["x1", "x1 x2", "x1 x2 x3", "x1 x2 x3 x4"]),
    "labels, 3 pieces": ({"context_length": 3}, ["x1", "x1 y1 x2", "x2 y2 x3", "x3 y3 x4"]),
}
"""The history shown before y1 to y4, by context."""
MODES = ("squash", "packed_dialogue")
PAIR = (("user", "x"), ("assistant", "y"))


# A stream


def epochs(folder: Path, quick: bool) -> Result:
    """Memory of a stream over three epochs, and what is left after a SIGKILL.

    A window of 8,192 rows and two workers, compared with `datasets` with a shuffle buffer of as many rows. A row of
    about 4 KB has a question and an answer of about 200 tokens and a document of 3 KB that is not part of the prompt.
    Memory is that of the process and all its children, shared pages counted once, sampled five times per second; all
    batches are created, without training. Then a run is killed with SIGKILL in its middle, and a second one resumes
    from its position.
    """
    make_model(folder / "model")
    wanted, window = (10**7, 1024) if quick else (16 * 10**7, WINDOW)
    count = write_documents(folder / "shards", wanted, shards=4)
    ours, peer = (watch(folder, count, window, EPOCHS, name) for name in ("partita", "datasets"))
    leftovers, resumed = kill_and_resume(folder, count, window)
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


def large(folder: Path, quick: bool) -> Result:
    """A stream of 5 GB in less than 1 GB of memory.

    One epoch over rows of about 4 KB in 16 files, with a window of 8,192 rows and two workers, tokens counted, killed
    with SIGKILL and resumed at half.
    """
    make_model(folder / "model")
    wanted = 2 * 10**8 if quick else LARGE_BYTES
    count = write_documents(folder / "shards", wanted, shards=16)
    started = time.perf_counter()
    first = watch(folder, count, WINDOW, 1, "partita", kill_after=count // 2)
    second = watch(folder, count, WINDOW, 1, "partita")
    seconds = time.perf_counter() - started
    lost, doubled = compare_keys(folder, count)
    most = max(first["peak"], second["peak"])
    row = {
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
    limits = [
        Limit("most MB of memory, workers included", most // 10**6, MOST_BYTES // 10**6, "max"),
        Limit("rows lost or doubled", lost + doubled, 0, "max"),
    ]
    return [row], limits


def write_documents(folder: Path, wanted: int, *, shards: int) -> int:
    """Write files of slightly more than `wanted` bytes in total; return the number of rows."""
    rng = random.Random(3)
    pieces = [words(rng, 20) for _ in range(2000)]
    document = words(rng, 1000)[:3000]
    folder.mkdir()
    written = number = 0
    for place, path in enumerate(shard_names(folder, shards), start=1):
        with path.open("w", encoding="utf8") as file:
            while written < wanted * place // shards:
                row = {
                    "number": number,
                    "premise": " ".join(rng.choices(pieces, k=rng.randint(2, 8))),
                    "claim": rng.choice(pieces),
                    "label": pieces[number % 50][:12],
                    "document": document,
                }
                written += file.write(json.dumps(row) + "\n")
                number += 1
    return number


def watch(folder: Path, *arguments: Any, kill_after: int | None = None) -> Row:
    """Run `stream_rows` in a new process; return its result and its peak memory in each epoch.

    The process is killed after `kill_after` rows.
    """
    environment = one_thread()
    if kill_after is not None:
        environment[WAIT_FROM] = str(kill_after)  # it must not end before
    process = subprocess.Popen(
        command(stream_rows, folder, *arguments), env=environment, stdout=subprocess.PIPE, text=True
    )
    state = folder / f"{arguments[-1]}.state"
    peaks: dict[int, int] = {}
    while process.poll() is None:
        at = json.loads(state.read_text()) if state.is_file() else None
        if at is not None and at["process"] == process.pid:
            peaks[at["epoch"]] = max(peaks.get(at["epoch"], 0), tree_memory(process.pid))
            if kill_after is not None and at["rows"] >= kill_after:
                process.send_signal(signal.SIGKILL)
                process.wait()
        time.sleep(0.2 if kill_after is None else 0.05)
    said = process.stdout.read() if process.stdout is not None else ""
    if process.returncode != (0 if kill_after is None else -signal.SIGKILL):
        sys.exit(f"{arguments} ended with {process.returncode}")
    found: Row = json.loads(said.splitlines()[-1]) if kill_after is None else {}
    return found | {"peaks": [peaks[epoch] for epoch in sorted(peaks)], "peak": max(peaks.values(), default=0)}


def slope(found: Row) -> int:
    return int(found["peaks"][-1] - found["peaks"][0])


def in_megabytes(found: Row) -> Row:
    peaks = {f"epoch {number} MB": peak // 10**6 for number, peak in enumerate(found["peaks"], start=1)}
    return {"rows": found["rows"], "seconds": found["seconds"], **peaks, "growth MB": slope(found) // 10**6}


def kill_and_resume(folder: Path, count: int, window: int) -> tuple[int, Row]:
    """Kill a run in its first epoch and resume it; return the number of leftovers and the row of the resumed run."""
    for path in folder.glob("partita*"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    before = shared_files()
    watch(folder, count, window, 1, "partita", kill_after=count // 2)
    time.sleep(2)
    left = len(shared_files() - before) + workers_of(folder)
    again = watch(folder, count, window, 1, "partita")
    lost, doubled = compare_keys(folder, count)
    return left, {"rows": again["rows"], "lost": lost, "doubled": doubled}


def shared_files() -> set[Path]:
    return set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()


def workers_of(folder: Path) -> int:
    """Return the number of processes still running that were started to read these rows."""
    import psutil

    found = 0
    for process in psutil.process_iter():
        try:
            found += any(str(folder) in word for word in process.cmdline()) and process.pid != os.getpid()
        except psutil.Error:
            continue
    return found


def compare_keys(folder: Path, count: int) -> tuple[int, int]:
    """Return the numbers of rows unused and used twice; each attempt counts up to its saved position."""
    keys = (folder / "partita.keys").read_text().splitlines()
    return count - len(set(keys)), len(keys) - len(set(keys))


def stream_rows(name: str, count: int, window: int, epochs: int, contender: str) -> Row:
    """Create the batches of these epochs, or the rest of them if an earlier process has saved a position."""
    return {"partita": by_partita, "datasets": by_datasets}[contender](Path(name), count, window, epochs)


def reporter(folder: Path, contender: str) -> Callable[[int, int], None]:
    """Return a function that writes the position for the watching process; from `WAIT_FROM` rows on it waits."""
    state, last, wait_from = folder / f"{contender}.state", [0.0], int(os.environ.get(WAIT_FROM, 0))

    def report(epoch: int, rows: int) -> None:
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

    return report


def by_partita(folder: Path, count: int, window: int, epochs: int) -> Row:
    """Read all rows of a stream; with one epoch, from the last position saved by an earlier process."""
    data = {
        "source": {"type": "jsonl", "path": str(folder / "shards" / "part-*.jsonl"), "streaming": True},
        "batching": {"type": "bucket", "window": window},
        "loader": {"workers": 2},
    }
    report = reporter(folder, "partita")
    saved_position = folder / "partita.position"
    found: Row = {"rows": 0, "tokens": 0, "bytes": 0}

    def consume(batches: Any) -> None:
        started = time.perf_counter()
        if saved_position.is_file():
            saved = json.loads(saved_position.read_text())
            batches.load_data_position(saved["position"])
            found.update(saved["found"])
        with (folder / "partita.keys").open("a", encoding="utf8") as file:
            file.truncate(found["bytes"])
            for number, step in enumerate(an_epoch(batches, epochs * count - found["rows"]), start=1):
                keys = [key for batch in step.micro_batches for key in batch.keys]
                found["rows"] += len(keys)
                found["tokens"] += sum(batch.tokens for batch in step.micro_batches)
                report((found["rows"] - 1) // count, found["rows"])
                found["bytes"] += file.write("".join(key + "\n" for key in keys))
                if epochs == 1 and number % 10 == 0:
                    file.flush()
                    save(saved_position, {"position": step.data_position, "found": found})
        found["seconds"] = round(time.perf_counter() - started, 1)

    config = settings(folder / "model", data, max_steps=10**9)
    with_batches(config, consume, run=Path(tempfile.mkdtemp(dir=folder)) / "run")
    return found


def save(path: Path, value: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value))
    beside.rename(path)


def by_datasets(folder: Path, count: int, window: int, epochs: int) -> Row:
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    stream = peers.datasets_stream(shard_names(folder / "shards", 4), tokenizer, buffer=window)

    def padded(rows: list[Row]) -> Any:
        return peers.pad([row["input_ids"] for row in rows])

    report, started, rows = reporter(folder, "datasets"), time.perf_counter(), 0
    for epoch in range(epochs):
        stream.set_epoch(epoch)
        for batch in DataLoader(stream, batch_size=32, num_workers=2, collate_fn=padded):
            rows += len(batch["input_ids"])
            report(epoch, rows)
    return {"rows": rows, "seconds": round(time.perf_counter() - started, 1)}


# Dialogues


def dialogues(folder: Path, quick: bool) -> Result:
    """Squashing 10,000 dialogues of 4 to 16 messages during reading: rows per second, memory, and equal targets.

    A stream without workers and a window of 512 dialogues, each run in a separate process: `squash` makes one row per
    answer, `packed_dialogue` one row per dialogue. The loss tokens of every dialogue are compared, answer by answer.
    Memory is that above the memory before the first batch, for a quarter of the dialogues and for all. The two golden
    tables of four exchanges are those of ParlAI's flattened episodes.
    """
    count = 800 if quick else 10_000
    sizes = (count // 4, count)
    make_model(folder / "model")
    for size in sizes:
        write_shards(folder / str(size), list(made_up_dialogues(size)), 4)
    table: list[Row] = [call(squash, folder, size, mode) for mode in MODES for size in sizes]
    different, compared = call(compare_modes, folder, count)
    golden = [wrong_rows(context, shown) for context, shown in GOLDEN.values()]
    grown = round(table[1]["most MB more"] - table[0]["most MB more"], 1)
    limits = [
        Limit("rows of the golden tables that differ", sum(golden), 0, "max"),
        Limit("dialogues whose learned tokens differ, squash from packed_dialogue", different, 0, "max"),
        Limit("dialogues that were compared", compared, count, "min"),
        Limit(f"MB that {count:,} dialogues take more than {count // 4:,}", grown, 20, "max"),
    ]
    return table, limits


def made_up_dialogues(count: int) -> Iterator[Row]:
    rng = random.Random(4)
    for _ in range(count):
        roles = ("user", "assistant") * rng.randint(2, 8)
        texts = (words(rng, max(1, round(rng.lognormvariate(2.3, 0.6)))) for _ in roles)
        yield {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}


def wrong_rows(context: Row, wanted: list[str]) -> int:
    """Return the number of wrong rows of an episode with four exchanges."""
    from partita.data.dialogue import Expander, HistoryLimits

    said = [{"role": role, "content": f"{mark}{i}"} for i in range(1, 5) for role, mark in PAIR]
    expander = Expander(column="messages", form="auto", mode="squash", context=HistoryLimits(**context))
    made = [row["messages"] for _, row in expander.expand({"messages": said}, "episode")]
    found = [(" ".join(message["content"] for message in row["messages"]), row["labels"]) for row in made]
    right = [(shown, [f"y{number}"]) for number, shown in enumerate(wanted, start=1)]
    return sum(a != b for a, b in zip(found, right, strict=False)) + abs(len(found) - len(right))


def squash(name: str, size: int, mode: str) -> Row:
    """Read all rows of an epoch, and return the row of the table."""
    folder = Path(name)
    found: Row = {"mode": mode, "dialogues": size}

    def consume(batches: Any) -> None:
        rows = tokens = 0
        before = most = tree_memory(os.getpid())
        with spending() as spent:
            for number, step in enumerate(an_epoch(batches, rows_of(mode, size))):
                rows += sum(batch.rows for batch in step.micro_batches)
                tokens += sum(batch.tokens for batch in step.micro_batches)
                if number % 10 == 0:
                    most = max(most, tree_memory(os.getpid()))
        found.update(
            rows=rows,
            tokens=tokens,
            **{"CPU s": round(spent.cpu, 2), "rows/CPU s": round(rows / spent.cpu)},
            **{"tokens/CPU s": round(tokens / spent.cpu), "MB before": before // 10**6},
            **{"most MB more": round((most - before) / 10**6, 1)},
        )

    with_batches(dialogue_config(folder, size, mode), consume, run=folder / f"run-{mode}-{size}")
    return found


def rows_of(mode: str, size: int) -> int:
    """Return the number of rows of this many dialogues."""
    return size if mode != "squash" else sum(len(row["messages"]) // 2 for row in made_up_dialogues(size))


def dialogue_config(folder: Path, size: int, mode: str) -> Row:
    source = {"type": "jsonl", "path": str(folder / str(size) / "part-*.jsonl"), "streaming": True}
    batching = {"type": "bucket", "window": 512}
    data = {"source": source, "batching": batching, "dialogue": {"mode": mode}}
    features = {
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
    }
    config = settings(folder / "model", data, max_steps=10**6) | features
    del config["prompt"]
    return config


def compare_modes(name: str, size: int) -> tuple[int, int]:
    """Return the numbers of dialogues whose loss tokens differ in the two modes, and of compared dialogues."""
    folder = Path(name)
    learned: dict[str, dict[str, dict[int, str]]] = {mode: {} for mode in MODES}
    for mode in MODES:

        def consume(batches: Any, mode: str = mode) -> None:
            for step in an_epoch(batches, rows_of(mode, size)):
                for batch in step.micro_batches:
                    note(batch, learned[mode])

        with_batches(dialogue_config(folder, size, mode), consume, run=folder / f"compare-{mode}")
    squashed, packed = (
        {key: [parts[number] for number in sorted(parts)] for key, parts in learned[mode].items()} for mode in MODES
    )
    different = sum(squashed.get(key) != packed.get(key) for key in squashed.keys() | packed.keys())
    return different, len(squashed.keys() & packed.keys())


def note(batch: Any, learned: dict[str, dict[int, str]]) -> None:
    """Record a hash of each sequence of loss tokens, by dialogue and position."""
    for key, labels in zip(batch.keys, batch.labels_BT.tolist(), strict=True):
        dialogue, _, number = key.partition("#")
        parts = learned.setdefault(dialogue, {})
        for place, stretch in enumerate(stretches(labels)):
            parts[int(number or 0) + place] = hashlib.blake2b(repr(stretch).encode(), digest_size=8).hexdigest()


def stretches(labels: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    before = -100
    for label in labels:
        if label != -100:
            if before == -100:
                found.append([])
            found[-1].append(label)
        before = label
    return found


if __name__ == "__main__":
    main(epochs, large, dialogues)
