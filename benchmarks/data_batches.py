"""Batches of the data layer: little padding, no row lost or repeated, and the same batches on any number of ranks."""

import gzip
import json
import os
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import peers
from fixtures import (
    LONGEST,
    WHOLE,
    WORDS,
    batches_hash,
    make_model,
    settings,
    snli_rows,
    spending,
    with_batches,
    write_rows,
    write_shards,
)
from harness import Limit, Result, Row, command, main

from partita.data.indexed_loader import IndexedLoader
from partita.data.ledger import Ledger
from partita.data.streams.stream_loader import StreamLoader, merged
from partita.distributed.thread_group import ThreadGroup

Plan = list[tuple[np.ndarray, np.ndarray]]
"""Batches: rows, and the line of each."""
WINDOW, PLANNED_ROWS = 2048, 32
TIMED = ("random", "HF group_by_length", "AllenNLP bucket", "ParlAI dynamic", "partita token_budget", "partita pack")
MOST_PADDING = {"chat": 0.025, "SNLI-like": 0.025, "squashed dialogues": 0.045}
BATCHES_OF_A_STEP = 4
JOBS = ((4, 0), (1, 2), (2, 1))
"""Successive numbers of ranks and workers."""
RANKS, ROWS_OF_A_BATCH, PATIENCE = 4, 8, 20
BROKEN = (b'{"number": ', b'{"number": 1, "premise": "\xff\xfe", "claim": "a", "label": "b"}', b'{"number": 1}', b"[1]")


# Padding


def chat_lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths of chats: most are short, one in twenty contains a document."""
    long = rng.random(count) < 0.05
    found = np.exp(np.where(long, rng.normal(7, 0.25, count), rng.normal(5.4, 0.55, count)))
    return np.clip(found, 16, LONGEST).astype(np.int64)


def snli_lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths of pairs of a caption and a short claim."""
    premise, claim = np.exp(rng.normal(2.6, 0.39, count)), np.exp(rng.normal(2.0, 0.3, count))
    return np.clip(premise + claim + 3, 8, 160).astype(np.int64)


def squashed_lengths(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return lengths of rows of dialogues with 4 to 16 turns, each answer after all earlier turns."""
    found: list[int] = []
    while len(found) < count:
        turns = np.exp(rng.normal(2.7, 0.68, int(rng.integers(2, 9)) * 2)).astype(int) + 3
        found += np.cumsum(turns)[1::2].tolist()
    return np.clip(np.array(found[:count]), 8, 1024).astype(np.int64)


LENGTHS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "chat": chat_lengths,
    "SNLI-like": snli_lengths,
    "squashed dialogues": squashed_lengths,
}
"""Padding in random batches of 32 is about 73 % (chat), 40 % (SNLI-like) and 61 % (squashed dialogues)."""


def padding(folder: Path, quick: bool) -> Result:
    """Padding of a batch plan compared with other libraries, and its effect on the speed of a tiny Llama.

    Three workloads of 20,000 row lengths; batches of 32 rows, or of the tokens of 32 mean rows. The Llama (128 wide,
    two layers, one thread) runs forward and backward over random batches of each plan in turn; medians of three.
    """
    count, rounds, timed_tokens = (4096, 1, 10_000) if quick else (20_000, 3, 100_000)
    rows: list[dict[str, Any]] = []
    limits: list[Limit] = []
    for workload, make in LENGTHS.items():
        lengths = make(count, np.random.default_rng(1))
        budget = int(lengths.mean() * PLANNED_ROWS)
        budget = max(budget, int(lengths.max()))
        plans, found = {}, {}
        for name, plan in contenders(lengths, budget).items():
            with spending() as spent:
                plans[name] = plan()
            found[name] = describe(plans[name], lengths, budget) | {"plan CPU s": round(spent.cpu, 3)}
            rows.append({"workload": workload, "contender": name, **found[name]})
        timed = TIMED if not quick else TIMED[:2] + TIMED[-2:] if workload == "chat" else ()
        rates = speeds({name: plans[name] for name in timed}, lengths, tokens=timed_tokens, rounds=rounds)
        for row in rows:
            if row["workload"] == workload and row["contender"] in rates:
                row["tokens/CPU s"] = rates[row["contender"]]
        own = found["partita token_budget"]
        limits += [
            Limit(f"{workload}: padding, token_budget", own["padding"], MOST_PADDING[workload], "max"),
            Limit(f"{workload}: batches above the budget", own["above"], 0, "max"),
            Limit(f"{workload}: rows lost or doubled", own["lost"] + own["doubled"], 0, "max"),
        ]
        if workload == "chat":
            best = max(rates["partita token_budget"], rates["partita pack"])
            limits.append(Limit("chat: tokens a CPU second over random", round(best / rates["random"], 2), 3, "min"))
    return rows, limits


def contenders(lengths: np.ndarray, budget: int) -> dict[str, Callable[[], Plan]]:
    """Return functions that plan an epoch, by contender."""
    longest = int(lengths.max())

    def alone(make: Any, **size: int) -> Plan:
        batches = make(lengths, seed=1, **size)
        return [(np.array(batch, dtype=np.int64), np.arange(len(batch))) for batch in batches]

    def planned_by(kind: str, sequences: int = PLANNED_ROWS, **batching: int) -> Plan:
        return planned(lengths, {"type": kind, "window": WINDOW, **batching}, sequences=sequences)

    rows, tokens = {"batch_size": PLANNED_ROWS}, {"max_tokens": budget}
    return {
        "random": partial(alone, peers.in_random_order, **rows),
        "HF group_by_length": partial(alone, peers.group_by_length, **rows),
        "AllenNLP bucket": partial(alone, peers.allennlp_bucket, **rows),
        "ParlAI batch cache": partial(alone, peers.parlai_batch_cache, **rows),
        "AllenNLP max tokens": partial(alone, peers.allennlp_max_tokens, **tokens),
        "ParlAI dynamic": partial(alone, peers.parlai_dynamic, **tokens),
        "partita bucket": partial(planned_by, "bucket"),
        "partita token_budget": partial(planned_by, "token_budget", max_tokens=budget),
        # A sequence is as long as the longest row, and a batch has as many sequences as fit into the budget.
        "partita pack": partial(planned_by, "pack", sequences=max(1, budget // longest), max_tokens=longest),
    }


def planned(lengths: np.ndarray, batching: dict[str, Any], *, sequences: int) -> Plan:
    """Return partita's plan of the first epoch."""
    from pydantic import TypeAdapter

    from partita.data.batching.indexed import IndexedPlanner
    from partita.data.batching.policies import build_policy
    from partita_schema.sections.batching import Batching

    policy = build_policy(TypeAdapter(Batching).validate_python(batching), batch_size=sequences)
    planner = IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=1)
    return [(batch.rows, batch.sequences) for step in planner.steps(0) for batch in step.batches]


def describe(plan: Plan, lengths: np.ndarray, budget: int) -> dict[str, Any]:
    """Return padding and counts of a plan."""
    real, cells, above, empty = 0, 0, 0, 0
    seen: Counter[int] = Counter()
    for rows, sequences in plan:
        seen.update(rows.tolist())
        size = cells_of(lengths[rows], sequences)
        real, cells = real + int(lengths[rows].sum()), cells + size
        above, empty = above + (size > budget), empty + (not len(rows))
    return {
        "padding": round(1 - real / cells, 4),
        "batches": len(plan),
        "empty": empty,
        "above": above,
        "lost": len(lengths) - len(seen),
        "doubled": sum(count - 1 for count in seen.values()),
    }


def cells_of(lengths: np.ndarray, sequences: np.ndarray) -> int:
    """Return the tokens of a batch, including padding."""
    if not len(lengths):
        return 0
    filled = np.bincount(sequences, weights=lengths)
    return int(filled.max()) * len(filled)


def speeds(plans: dict[str, Plan], lengths: np.ndarray, *, tokens: int, rounds: int) -> dict[str, int]:
    """Return the tokens per CPU second of each plan, without padding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=LONGEST, **shape)
    model = LlamaForCausalLM(config).train()
    step(model, np.array([64]), np.array([0]))
    rates: dict[str, list[float]] = {name: [] for name in plans}
    for seed in range(rounds):
        for name, plan in plans.items():
            done, cpu = 0, 0.0
            for place in np.random.default_rng(seed).permutation(len(plan)):
                rows, sequences = plan[place]
                with spending() as spent:
                    step(model, lengths[rows], sequences)
                done, cpu = done + int(lengths[rows].sum()), cpu + spent.cpu
                if done >= tokens:
                    break
            rates[name].append(done / cpu)
    return {name: round(statistics.median(found)) for name, found in rates.items()}


def step(model: Any, lengths: np.ndarray, sequences: np.ndarray) -> None:
    """Run forward and backward over random tokens; rows in one line do not attend to each other."""
    import torch

    filled = np.bincount(sequences, weights=lengths).astype(int)
    width = int(filled.max())
    ids = torch.randint(1, 512, (len(filled), width))
    inside = torch.arange(width) < torch.tensor(filled)[:, None]
    labels = torch.where(inside, ids, -100)
    if len(filled) == len(lengths):  # padded on the right, which causal attention never attends to
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    else:
        positions = torch.zeros_like(ids)
        ends = dict.fromkeys(range(len(filled)), 0)
        for length, sequence in zip(lengths.tolist(), sequences.tolist(), strict=True):
            positions[sequence, ends[sequence] : ends[sequence] + length] = torch.arange(length)
            ends[sequence] += length
        model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss.backward()
    model.zero_grad()


# Ranks that change


def ranks(folder: Path, quick: bool) -> Result:
    """Ranks 4, 1, 2 and workers 0, 2, 1 in the middle of an epoch, compared with one run that never changes.

    SNLI-like rows, four batches per step. A rank is a loader with that rank, as each process of a job creates it; here
    all of them are in one process. A job stops after a third and two thirds of an epoch and resumes with other numbers,
    up to the end of the second epoch. Hashes of all contents of a step are compared.
    """
    remember_arguments()
    count = 1500 if quick else 12_000
    rows = list(snli_rows(count))
    indexed = {"source": str(write_rows(folder / "rows.jsonl", rows)), "split": WHOLE}
    shards = write_shards(folder / "shards", rows, 8)
    model = make_model(folder / "model")
    stream = {"source": {"type": "jsonl", "path": shards, "streaming": True}}
    budget = {"type": "token_budget", "max_tokens": 512, "window": 512}
    kinds: dict[str, Row] = {
        "indexed, bucket": indexed | {"batching": {"type": "bucket", "window": 512}},
        "indexed, token_budget": indexed | {"batching": budget},
        "indexed, pack": indexed | {"batching": {"type": "pack", "max_tokens": 128, "window": 512}},
        "stream, bucket": stream | {"batching": {"type": "bucket", "window": 256}},
        "stream, token_budget": stream | {"batching": budget | {"window": 256}},
    }
    table = []
    for number, (kind, data) in enumerate(kinds.items()):
        size = 4 if data["batching"]["type"] == "pack" else 16
        accumulated = {"gradient_accumulation_steps": BATCHES_OF_A_STEP}
        config = settings(model, data, max_steps=10**6, batch_size=size, **accumulated)
        compared: list[Row] = []
        with_batches(config, comparison(kind, count, compared), run=folder / f"run-{number}")
        table += compared
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("rows lost or doubled", sum(row["lost"] + row["doubled"] for row in table), 0, "max"),
    ]
    return table, limits


def comparison(kind: str, count: int, found: list[Row]) -> Callable[[Any], None]:
    def compare(batches: Any) -> None:
        fixed = list(two_epochs(job(batches, ranks=1, workers=0, data_position=None), count))
        places = [len(fixed) // 6, len(fixed) // 3, len(fixed)]
        changed: list[tuple[Any, ...]] = []
        data_position = None
        for (ranks, workers), end in zip(JOBS, places, strict=True):
            steps = job(batches, ranks=ranks, workers=workers, data_position=data_position)
            changed += islice(steps, end - len(changed))
            steps.close()
            data_position = json.loads(json.dumps(changed[-1][1]))
        keys = [key for _, _, part in changed for key in part]
        found.append(
            {
                "rows": kind,
                "steps": len(fixed),
                "changes behind steps": f"{places[0]:,}, {places[1]:,}",
                "differences": sum(a[0] != b[0] for a, b in zip(fixed, changed, strict=True)),
                "lost": 2 * count - sum(min(keys_of, 2) for keys_of in Counter(keys).values()),
                "doubled": sum(max(0, keys_of - 2) for keys_of in Counter(keys).values()),
                "position bytes": max(len(json.dumps(step[1])) for step in changed),
            }
        )

    return compare


def two_epochs(steps: Iterator[tuple[Any, ...]], count: int) -> Iterator[tuple[Any, ...]]:
    rows = 0
    for step in steps:
        rows += len(step[2])
        yield step
        if rows >= 2 * count:
            return


def job(
    batches: Any, *, ranks: int, workers: int, data_position: Any, ledgers: list[Any] | None = None
) -> Generator[tuple[str, Any, list[str]], None, None]:
    """Yield hash, position and keys of each step of a job. Ledgers of a stream's ranks are added to `ledgers`."""
    loaders = []
    for process_group in ThreadGroup.of(ranks):
        ledger = Ledger(None, max_bad_rows=0.05)
        loaders.append(of_rank(batches, process_group=process_group, workers=workers, ledger=ledger))
        if ledgers is not None:
            ledgers.append(ledger)
    for loader in loaders:
        if data_position is not None:
            loader.load_data_position(data_position)
    for steps in in_step(loaders):
        # Batch s of a step belongs to rank s modulo their number.
        parts = [steps[slot % ranks].micro_batches[slot // ranks] for slot in range(BATCHES_OF_A_STEP)]
        yield batches_hash(parts), one_data_position(steps), [key for batch in parts for key in batch.keys]


def in_step(loaders: list[Any]) -> Iterator[list[Any]]:
    """Yield the next step of all loaders; a thread for each stands in for its process."""
    running = [loader.steps() for loader in loaders]
    with ThreadPoolExecutor(len(loaders)) as threads:
        while True:
            yield list(threads.map(next, running))


def one_data_position(steps: Any) -> Any:
    """Return the position of a job: equal on all ranks for indexed rows, merged from all ranks for a stream."""
    data_positions = [step.data_position for step in steps]
    state = data_positions[0]["loader_state"]
    return merged(data_positions) if isinstance(state, dict) and "groups" in state else data_positions[0]


def of_rank(batches: Any, *, process_group: ThreadGroup, workers: int, ledger: Ledger) -> Any:
    """Return the loader of a rank, created from that of a single process."""
    arguments, named = batches.made_with
    named = named | {"process_group": process_group}
    if isinstance(batches, StreamLoader):
        named["options"] = named["options"].model_copy(update={"workers": workers})
        named["ledger"] = ledger
    return type(batches)(*arguments, **named)


def remember_arguments() -> None:
    """Make loaders record their constructor arguments."""
    for kind in (IndexedLoader, StreamLoader):
        original = kind.__init__

        def remembering(self: Any, *arguments: Any, original: Any = original, **named: Any) -> None:
            self.made_with = arguments, named
            original(self, *arguments, **named)

        kind.__init__ = remembering  # type: ignore[method-assign]


# Hard cases


def hard_cases(folder: Path, quick: bool) -> Result:
    """Cases in which loaders hang, repeat or drop rows, compared with accelerate's batch dispatch on two processes.

    Four ranks, 1,003 SNLI-like rows, streamed, four batches of 8 per step: a number of rows that is not divisible by
    any number of ranks; two compressed files for four ranks; one row a hundred times as long as the others; ten broken
    rows (no JSON, not UTF-8, no column, a wrong type). partita's ranks are in one process, as in the part `ranks`. The
    rows of the peer are those that both of its processes received; after 20 seconds without progress it counts as hung.
    """
    remember_arguments()
    count = 203 if quick else 1003
    table: list[Row] = []
    model = make_model(folder / "model")
    patterns: dict[str, str] = {}
    broken: dict[str, int] = {}
    for number, (case, make) in enumerate(CASES.items()):
        place = folder / f"case-{number}"
        place.mkdir()
        patterns[case], broken[case] = make(place, list(snli_rows(count)))
        found = streamed_by_ranks(place, model, patterns[case], broken[case], count)
        table.append({"case": case, "loader": "partita, 4 ranks", **found})
    mine = list(table)
    for case, row in of_accelerate(folder, model, patterns, count).items():
        table.append({"case": case, "loader": "accelerate, 2 processes", "broken": broken[case], **row})
    limits = [
        Limit("cases that end", sum(row["end"] == "ended" for row in mine), len(CASES), "min"),
        Limit("good rows lost or doubled", sum(row["lost"] + row["doubled"] for row in mine), 0, "max"),
        Limit("broken rows that were not counted", sum(row["broken"] - row["counted"] for row in mine), 0, "max"),
    ]
    return table, limits


def uneven(folder: Path, rows: list[Row]) -> tuple[str, int]:
    return write_parts(folder, rows, files=4), 0


def few_shards(folder: Path, rows: list[Row]) -> tuple[str, int]:
    """Write compressed files, which cannot be split."""
    for number in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in rows[number::2])
        (folder / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return str(folder / "part-*.jsonl.gz"), 0


def long_row(folder: Path, rows: list[Row]) -> tuple[str, int]:
    rows[len(rows) // 2]["premise"] = " ".join(WORDS[:10] * 80)
    return write_parts(folder, rows, files=4), 0


def broken_rows(folder: Path, rows: list[Row]) -> tuple[str, int]:
    """Write the same good rows, with broken ones among them."""
    broken = max(1, len(rows) // 100)
    pattern = write_parts(folder, rows, files=4)
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


def write_parts(folder: Path, rows: list[Row], *, files: int) -> str:
    for number in range(files):
        write_rows(folder / f"part-{number}.jsonl", rows[number::files])
    return str(folder / "part-*.jsonl")


def streamed_by_ranks(folder: Path, model: Path, pattern: str, broken: int, count: int) -> Row:
    data = {
        "source": {"type": "jsonl", "path": pattern, "streaming": True},
        "batching": {"type": "token_budget", "max_tokens": LONGEST, "max_rows": ROWS_OF_A_BATCH, "window": 64},
        "max_bad_rows": 0.05,
    }
    config = settings(model, data, max_steps=10**6, gradient_accumulation_steps=RANKS)
    config["preprocessing"] = {"global_max_sequence_length": LONGEST}
    found: Row = {}

    def consume(batches: Any) -> None:
        ledgers: list[Any] = []
        with spending() as spent:
            keys: list[str] = []
            steps = 0
            for _, _, part in job(batches, ranks=RANKS, workers=0, data_position=None, ledgers=ledgers):
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
    """Return, by case, the rows that two processes received together, and the outcome."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}
    outputs = [folder / f"rank-{rank}.jsonl" for rank in range(2)]
    processes = [
        subprocess.Popen(
            command(dispatched, model, patterns, output),
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


def dispatched(model: str, patterns: dict[str, str], output: str) -> None:
    """Run one process of the peer, which writes the rows that it receives in each case."""
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from datasets import load_dataset
    from torch.utils.data import DataLoader
    from transformers import AutoTokenizer

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def padded(rows: list[Row]) -> Any:
        # Batches are concatenated: all are as wide as the longest row.
        batch = peers.pad([*(row["input_ids"] for row in rows), [0] * LONGEST])
        return {"input_ids": batch["input_ids"][:-1], "number": torch.tensor([row["number"] for row in rows])}

    with Path(output).open("w", encoding="utf8", buffering=1) as file:
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
    main(padding, ranks, hard_cases)
