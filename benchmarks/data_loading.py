"""Speed of the data layer: workers, rows encoded during reading, and resuming in the middle of an epoch."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import peers
from fixtures import (
    WHOLE,
    an_epoch,
    make_model,
    settings,
    snli_rows,
    spending,
    with_batches,
    write_rows,
    write_shards,
)
from harness import Limit, Result, Row, main

from partita.data.formatting.formatter import Formatter

ROWS_OF_A_BATCH = 32
RESUMED_ROWS, BUFFER = 16, 1000
"""Rows of a batch and of the shuffle buffer of `datasets` in the part `resume`."""
SHARES = (0.01, 0.5, 0.99)
ROWS = 960
MANY = 10 * ROWS
ALLENNLP = {
    ("plain", 0): 0.543,
    ("plain", 2): 0.353,
    ("plain", 5): 0.203,
    ("slow", 0): 12.475,
    ("slow", 2): 6.328,
    ("slow", 5): 2.761,
}
"""Seconds in its release notes for torch's loader."""
Times = tuple[float, float, float]
"""Seconds: CPU, wall, and wall to the first batch."""
Found = dict[tuple[str, str, int], list[Times]]


class SlowFormatter(Formatter):
    """Formats rows like partita and sleeps SECONDS_A_ROW for each: `data.formatter` of slow rows."""

    def format_all(self, rows: Sequence[Any], keys: Sequence[str], *, supervised: bool = True) -> Any:
        time.sleep(float(os.environ["SECONDS_A_ROW"]) * len(rows))
        return super().format_all(rows, keys, supervised=supervised)


# Workers


def workers(folder: Path, quick: bool) -> Result:
    """AllenNLP's measurement of its move to torch's loader, repeated: 30 batches of 32 SNLI-like rows, plain and slow.

    Seconds to read, encode and collate 960 rows of a JSONL file in file order, from the request for the first batch to
    the end of the workers: mean and deviation of 5 runs. Slow rows take a further 0.01 s each; without workers they run
    once. partita reads a stream. AllenNLP's numbers are from another machine and its own tokenizer.

    960 plain rows finish before worker processes have started. Ten times as many, which take about as long as
    AllenNLP's did, show whether workers pay off for plain rows; the time to the first batch shows the cost of starting
    them.
    """
    rounds, slow = (1, 0.001) if quick else (5, 0.01)
    found: Found = {}
    kinds = {"plain": (ROWS, 0.0), "plain, many": (MANY, 0.0), "slow": (ROWS, slow)}
    paths = {count: write_rows(folder / f"{count}.jsonl", snli_rows(count)) for count in (ROWS, MANY)}
    model = make_model(folder / "model")
    contenders: dict[str, Callable[[int, int, float], Times]] = {
        "torch DataLoader": lambda *asked: read_by_peer(peers.torch_loader, paths, model, *asked),
        "StatefulDataLoader": lambda *asked: read_by_peer(peers.stateful_loader, paths, model, *asked),
        "partita": lambda *asked: read_by_partita(paths, model, *asked),
    }
    for measure in contenders.values():
        measure(ROWS, 0, 0.0)  # warm up imports and the file cache of the system
    for kind, (count, delay) in kinds.items():
        for _ in range(rounds):
            for number in (0, 2, 5):
                for name, measure in contenders.items():
                    times = found.setdefault((name, kind, number), [])
                    if not (times and delay and not number):
                        times.append(measure(count, number, delay))
    return workers_table(found), workers_limits(found, slow)


def read_by_peer(make: Any, paths: dict[int, Path], model: Path, count: int, workers: int, delay: float) -> Times:
    from transformers import AutoTokenizer

    dataset = peers.TextRows(paths[count], AutoTokenizer.from_pretrained(model), delay=delay)
    loader = make(dataset, batch_size=ROWS_OF_A_BATCH, workers=workers)
    rows, first = 0, 0.0
    with spending() as spent:
        started = time.perf_counter()
        for batch in loader:
            first = first or time.perf_counter() - started
            rows += len(batch["input_ids"])
    assert rows == count
    return spent.cpu, spent.wall, first


def read_by_partita(paths: dict[int, Path], model: Path, count: int, workers: int, delay: float) -> Times:
    os.environ["SECONDS_A_ROW"] = str(delay)
    data: dict[str, Any] = {
        "source": {"type": "jsonl", "path": str(paths[count]), "streaming": True},
        "batching": {"type": "fixed", "shuffle": False},
        "loader": {"workers": workers},
    }
    if delay:
        data["formatter"] = "data_loading:SlowFormatter"
    found: list[Times] = []

    def consume(batches: Any) -> None:
        steps, first = 0, 0.0
        with spending() as spent:
            started = time.perf_counter()
            for _ in an_epoch(batches, count):
                first = first or time.perf_counter() - started
                steps += 1
        assert steps == count // ROWS_OF_A_BATCH
        found.append((spent.cpu, spent.wall, first))

    with tempfile.TemporaryDirectory() as run:
        with_batches(settings(model, data, max_steps=1000), consume, run=Path(run) / "run")
    return found[0]


def workers_table(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "rows": kind,
            "workers": workers,
            "loader": name,
            "CPU s": round(statistics.mean(cpu for cpu, *_ in times), 3),
            "seconds": round(mean_wall(times), 3),
            "deviation": round(statistics.pstdev(wall for _, wall, _ in times), 3),
            "first batch s": round(statistics.mean(first for *_, first in times), 3),
            "AllenNLP's": ALLENNLP.get((kind, workers), "") if name == "torch DataLoader" else "",
        }
        for (name, kind, workers), times in found.items()
    ]


def mean_wall(times: list[Times]) -> float:
    return statistics.mean(wall for _, wall, _ in times)


def workers_limits(found: Found, slow: float) -> list[Limit]:
    """Return the limits; those for slow rows apply only if they are as slow as AllenNLP's, not in the quick run."""
    seconds = {key: mean_wall(times) for key, times in found.items()}
    one = seconds["partita", "plain, many", 0]
    made = [
        Limit(f"slow rows, {workers} workers: seconds", round(seconds["partita", "slow", workers], 2), limit, "max")
        for workers, limit in ((2, 5.5), (5, 2.5))
        if slow == 0.01
    ]
    made += [
        Limit(
            f"many plain rows, {workers} workers: seconds over those of one process",
            round(seconds["partita", "plain, many", workers] / one, 2),
            1,
            "max",
        )
        for workers in (2, 5)
    ]
    peer = "torch DataLoader"
    made.append(
        Limit(
            "many plain rows, 0 workers: seconds over those of torch's DataLoader",
            round(one / seconds[peer, "plain, many", 0], 2),
            1,
            "max",
        )
    )
    first = {key: statistics.mean(first for *_, first in times) for key, times in found.items()}
    return made + [
        Limit(
            f"slow rows, {workers} workers: seconds to the first batch over those of torch's DataLoader",
            round(first["partita", "slow", workers] / first[peer, "slow", workers], 2),
            1.2,
            "max",
        )
        for workers in (0, 2, 5)
        if slow == 0.01
    ]


# Encoding


def encode(folder: Path, quick: bool) -> Result:
    """An epoch with rows encoded on the fly, compared with precomputed tokens: seconds, and bytes on disk.

    8,000 SNLI-like rows in batches of 32 in file order; a tiny Llama (128 wide, two layers, one thread) is trained in
    the same process. Precomputed: by `datasets.map` into its cache, and by partita with `encode: cache`; this is not
    part of the epoch. On the fly: a stream, without workers and with two. In turn, medians of three.
    """
    count, rounds = (2400, 1) if quick else (8000, 3)
    cache = folder / "cache"
    os.environ["PARTITA_CACHE"] = str(cache / "partita")
    path = write_rows(folder / "rows.jsonl", snli_rows(count))
    model = make_model(folder / "model")
    learn = learner()
    made, seconds = map_rows(path, model, cache / "datasets")
    cached: Row = {"source": str(path), "split": WHOLE, "encode": "cache"}
    streams: list[Row] = [
        {"source": {"type": "jsonl", "path": str(path), "streaming": True}, "loader": {"workers": number}}
        for number in (0, 2)
    ]
    contenders: dict[str, Callable[[int], tuple[float, float]]] = {
        "datasets.map": lambda rows: learn_from_map(made, learn),
        "partita, encode: cache": lambda rows: learn_from_partita(folder, model, cached, rows, learn),
        "partita, stream, 0 workers": lambda rows: learn_from_partita(folder, model, streams[0], rows, learn),
        "partita, stream, 2 workers": lambda rows: learn_from_partita(folder, model, streams[1], rows, learn),
    }
    before = {"datasets.map": (seconds, size(cache))}
    for contender in list(contenders)[1:]:
        start = size(cache)
        contenders[contender](ROWS_OF_A_BATCH)  # warm up imports, and precompute the tokens
        before[contender] = (0.0, size(cache) - start)
    times: dict[str, list[tuple[float, float]]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, measure in contenders.items():
            times[contender].append(measure(count))
    rows = [
        {
            "tokens": contender,
            "CPU s": round(statistics.median(cpu for cpu, _ in found), 2),
            "seconds": round(statistics.median(wall for _, wall in found), 2),
            "bytes on disk": before[contender][1],
            "seconds before": round(before[contender][0], 2) or "",
        }
        for contender, found in times.items()
    ]
    peer, online = "datasets.map", "partita, stream, 2 workers"
    ratio = statistics.median(b[1] / a[1] for a, b in zip(times[peer], times[online], strict=True))
    limits = [
        Limit("seconds of an epoch, on the fly with 2 workers over datasets.map", round(ratio, 3), 1.05, "max"),
        Limit("bytes on disk, on the fly", before[online][1], 0, "max"),
    ]
    return rows, limits


def learner() -> Callable[[Any, Any], None]:
    """Return a function that takes a training step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
    module = LlamaForCausalLM(LlamaConfig(vocab_size=2048, max_position_embeddings=512, **shape)).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def learn(ids: Any, labels: Any) -> None:
        module(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return learn


def map_rows(path: Path, model: Path, cache: Path) -> tuple[Any, float]:
    """Return rows with tokens cached by `datasets`, and the seconds for creating them."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    with spending() as spent:
        made = rows.map(lambda row: {"input_ids": peers.encode(row, tokenizer)}, remove_columns=rows.column_names)
    return made, spent.wall


def learn_from_map(rows: Any, learn: Callable[[Any, Any], None]) -> tuple[float, float]:
    with spending() as spent:
        for start in range(0, len(rows), ROWS_OF_A_BATCH):
            batch = peers.pad(rows[start : start + ROWS_OF_A_BATCH]["input_ids"])
            learn(batch["input_ids"], batch["labels"])
    return spent.cpu, spent.wall


def learn_from_partita(
    folder: Path, model: Path, data: Row, rows: int, learn: Callable[[Any, Any], None]
) -> tuple[float, float]:
    found = []

    def consume(batches: Any) -> None:
        with spending() as spent:
            for step in an_epoch(batches, rows):
                for batch in step.micro_batches:
                    learn(batch.input_ids_BT, batch.labels_BT)
        found.append((spent.cpu, spent.wall))

    with tempfile.TemporaryDirectory(dir=folder) as run:
        config = settings(model, data | {"batching": {"type": "fixed", "shuffle": False}}, max_steps=10**6)
        with_batches(config, consume, run=Path(run) / "run")
    return found[0]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# Resuming


def resume(folder: Path, quick: bool) -> Result:
    """Seconds to the first batch after a resume at 1, 50 and 99 % of an epoch, compared with other libraries.

    20,000 SNLI-like rows in batches of 16. Files, tokenizer and plan are already open; the measured time depends on the
    position: loading it, and the first batch. The Trainer skips batches with accelerate's `skip_first_batches`;
    `datasets` loads the state of a stream with a shuffle buffer of 1,000 rows, and its rows are counted to the end.
    partita resumes encoded rows (indexed), and a stream of four files with a window of 2,048 rows.
    """
    count = 6000 if quick else 20_000
    rows = list(snli_rows(count))
    path = write_rows(folder / "rows.jsonl", rows)
    stream = {"type": "jsonl", "path": write_shards(folder / "shards", rows, 4), "streaming": True}
    model = make_model(folder / "model")
    places = [max(1, int(share * count / RESUMED_ROWS)) for share in SHARES]
    indexed = {"source": str(path), "split": WHOLE}
    found = {
        "Trainer's skip": skipped(path, model, places),
        "datasets, shuffle buffer": resumed_datasets(path, model, places, count),
        "partita, indexed": resumed_partita(model, indexed, places, folder / "indexed", count),
        "partita, stream": resumed_partita(model, {"source": stream}, places, folder / "stream", count),
    }
    limits = [
        *resume_limits(found["partita, indexed"], "indexed", most=0.05, slope=0.02),
        *resume_limits(found["partita, stream"], "stream", most=0.5, slope=0.1),
    ]
    return [{"resumed": name, **row} for name, measured in found.items() for row in measured], limits


def resume_limits(rows: list[Row], name: str, *, most: float, slope: float) -> list[Limit]:
    seconds = [row["CPU s"] for row in rows]
    return [
        Limit(f"{name}: most CPU seconds to the first batch", max(seconds), most, "max"),
        Limit(f"{name}: CPU seconds at 99 % less those at 1 %", round(seconds[-1] - seconds[0], 4), slope, "max"),
        Limit(f"{name}: rows lost or doubled", sum(row["lost"] + row["doubled"] for row in rows), 0, "max"),
    ]


def described(place: int, share: float, spent: Any, *, state: int = 0, lost: int = 0, doubled: int = 0) -> Row:
    return {
        "at": f"{share:.0%}",
        "batches before": place,
        "CPU s": round(spent.cpu, 4),
        "seconds": round(spent.wall, 4),
        "state bytes": state,
        "lost": lost,
        "doubled": doubled,
    }


def skipped(path: Path, model: Path, places: list[int]) -> list[Row]:
    from transformers import AutoTokenizer

    dataset = peers.TextRows(path, AutoTokenizer.from_pretrained(model))
    loader = peers.torch_loader(dataset, batch_size=RESUMED_ROWS, workers=0)
    next(iter(peers.skip_batches(loader, 1)))
    found = []
    for place, share in zip(places, SHARES, strict=True):
        with spending() as spent:
            next(iter(peers.skip_batches(loader, place)))
        found.append(described(place, share, spent))
    return found


def resumed_datasets(path: Path, model: Path, places: list[int], count: int) -> list[Row]:
    """Resume from the state of `datasets`; its rows are those before the position and those after it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def opened() -> Any:
        return peers.datasets_stream([path], tokenizer, buffer=BUFFER)

    rows = opened()
    before: list[int] = []
    states = {}
    for number, row in enumerate(rows, start=1):
        before.append(row["number"])
        if number % RESUMED_ROWS == 0 and number // RESUMED_ROWS in places:
            states[number // RESUMED_ROWS] = rows.state_dict()
    found = []
    for place, share in zip(places, SHARES, strict=True):
        rows = opened()
        with spending() as spent:
            rows.load_state_dict(states[place])
            after = iter(rows)
            part = [row["number"] for row in islice(after, RESUMED_ROWS)]
        numbers = [*before[: place * RESUMED_ROWS], *part, *(row["number"] for row in after)]
        lost = count - len(set(numbers))
        state = len(json.dumps(states[place]))
        doubled = len(numbers) - len(set(numbers))
        found.append(described(place, share, spent, state=state, lost=lost, doubled=doubled))
    return found


def resumed_partita(model: Path, data: Row, places: list[int], run: Path, count: int) -> list[Row]:
    """Resume from the state of a step."""
    config = settings(model, data | {"batching": {"type": "bucket"}}, batch_size=RESUMED_ROWS, max_steps=10**6)
    data_positions: dict[int, Any] = {}
    keys: list[list[str]] = []
    found: list[Row] = []

    def look(batches: Any) -> None:
        for number, step in enumerate(an_epoch(batches, count), start=1):
            keys.append([key for batch in step.micro_batches for key in batch.keys])
            if number in places:
                data_positions[number] = json.loads(json.dumps(step.data_position))

    with_batches(config, look, run=run)
    for place, share in zip(places, SHARES, strict=True):
        with_batches(
            config,
            resumed_at(place, share, data_positions[place], keys, found),
            run=run.with_name(f"{run.name}{place}"),
        )
    return found


def resumed_at(
    place: int, share: float, data_position: Any, keys: list[list[str]], found: list[Row]
) -> Callable[[Any], None]:
    def consume(batches: Any) -> None:
        with spending() as spent:
            batches.load_data_position(data_position)
            steps = batches.steps()
            first = next(steps)
        after = [first, *(next(steps) for _ in range(len(keys) - place - 1))]
        steps.close()
        seen = [key for step in after for batch in step.micro_batches for key in batch.keys]
        wanted = [key for step in keys[place:] for key in step]
        lost = len(set(wanted) - set(seen))
        doubled = len(seen) - len(set(seen)) + len(set(seen) - set(wanted))
        assert lost or doubled or seen == wanted
        state = len(json.dumps(data_position))
        found.append(described(place, share, spent, state=state, lost=lost, doubled=doubled))

    return consume


if __name__ == "__main__":
    main(workers, encode, resume)
