"""Squashing 10,000 dialogues of 4 to 16 messages while they are read: rows a second, memory, the same targets.

A stream without workers and a window of 512 dialogues, each run in a process of its own: `squash` makes a row for each
answer, `packed_dialogue` a row for each dialogue. The learned tokens of every dialogue are compared, answer by answer.
Memory is what the process held more than before its first batch, for a quarter of the dialogues and for all. The two
golden tables of four exchanges are those of ParlAI's flattened episodes.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Limit, about, parse_arguments, report, run_script
from workloads_data import an_epoch, make_model, settings, spending, tree_memory, with_batches, words, write_shards

GOLDEN = {
    "no labels, all": ({"include_labels": False}, ["x1", "x1 x2", "x1 x2 x3", "x1 x2 x3 x4"]),
    "labels, 3 pieces": ({"context_length": 3}, ["x1", "x1 y1 x2", "x2 y2 x3", "x3 y3 x4"]),
}
"""What is shown before y1 to y4, by name and context."""
MODES = ("squash", "packed_dialogue")
Row = dict[str, Any]
PAIR = (("user", "x"), ("assistant", "y"))


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 800 if arguments.quick else 10_000
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for size in (count // 4, count):
            write_shards(folder / str(size), list(dialogues(size)), 4)
        for mode in MODES:
            for size in (count // 4, count):
                table.append(json.loads(run_script([__file__, "--one", folder, size, mode]).splitlines()[-1]))
        different, compared = json.loads(run_script([__file__, "--compare", folder, count]).splitlines()[-1])
    golden = [wrong_rows(context, shown) for context, shown in GOLDEN.values()]
    grown = round(table[1]["most MB more"] - table[0]["most MB more"], 1)
    limits = [
        Limit("rows of the golden tables that differ", sum(golden), 0, "max"),
        Limit("dialogues whose learned tokens differ, squash from packed_dialogue", different, 0, "max"),
        Limit("dialogues that were compared", compared, count, "min"),
        Limit(f"MB that {count:,} dialogues take more than {count // 4:,}", grown, 20, "max"),
    ]
    report("data_dialogues", table, limits, arguments=arguments, about=about(__doc__))


def dialogues(count: int) -> Iterator[Row]:
    chance = random.Random(4)
    for _ in range(count):
        roles = ("user", "assistant") * chance.randint(2, 8)
        texts = (words(chance, max(1, round(chance.lognormvariate(2.3, 0.6)))) for _ in roles)
        yield {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}


def wrong_rows(context: Row, wanted: list[str]) -> int:
    """Rows of an episode of four exchanges that are not as they should be."""
    from partita.data.dialogue import Expander, HistoryLimits

    said = [{"role": role, "content": f"{mark}{i}"} for i in range(1, 5) for role, mark in PAIR]
    expander = Expander(column="messages", form="auto", mode="squash", context=HistoryLimits(**context))
    made = [row["messages"] for _, row in expander.expand({"messages": said}, "episode")]
    found = [(" ".join(message["content"] for message in row["messages"]), row["labels"]) for row in made]
    right = [(shown, [f"y{number}"]) for number, shown in enumerate(wanted, start=1)]
    return sum(a != b for a, b in zip(found, right, strict=False)) + abs(len(found) - len(right))


def one(folder: Path, size: int, mode: str) -> None:
    """All rows of an epoch; prints a line of JSON."""
    told: Row = {"mode": mode, "dialogues": size}

    def consume(batches: Any) -> None:
        rows = tokens = 0
        before = most = tree_memory(os.getpid())
        with spending() as spent:
            for number, step in enumerate(an_epoch(batches, rows_of(mode, size))):
                rows += sum(batch.rows for batch in step.micro_batches)
                tokens += sum(batch.tokens for batch in step.micro_batches)
                if number % 10 == 0:
                    most = max(most, tree_memory(os.getpid()))
        told.update(
            rows=rows,
            tokens=tokens,
            **{"CPU s": round(spent.cpu, 2), "rows/CPU s": round(rows / spent.cpu)},
            **{"tokens/CPU s": round(tokens / spent.cpu), "MB before": before // 10**6},
            **{"most MB more": round((most - before) / 10**6, 1)},
        )

    with_batches(file_of(folder, size, mode), consume, run=folder / f"run-{mode}-{size}")
    print(json.dumps(told))


def rows_of(mode: str, size: int) -> int:
    """Rows that so many dialogues give."""
    return size if mode != "squash" else sum(len(row["messages"]) // 2 for row in dialogues(size))


def file_of(folder: Path, size: int, mode: str) -> Row:
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


def compare(folder: Path, size: int) -> None:
    """Prints the number of dialogues of which not the same is learned in both modes, and of those compared."""
    learned: dict[str, dict[str, dict[int, str]]] = {mode: {} for mode in MODES}
    for mode in MODES:

        def consume(batches: Any, mode: str = mode) -> None:
            for step in an_epoch(batches, rows_of(mode, size)):
                for batch in step.micro_batches:
                    note(batch, learned[mode])

        with_batches(file_of(folder, size, mode), consume, run=folder / f"compare-{mode}")
    squashed, packed = (
        {key: [parts[number] for number in sorted(parts)] for key, parts in learned[mode].items()} for mode in MODES
    )
    different = sum(squashed.get(key) != packed.get(key) for key in squashed.keys() | packed.keys())
    print(json.dumps([different, len(squashed.keys() & packed.keys())]))


def note(batch: Any, learned: dict[str, dict[int, str]]) -> None:
    """Keep a hash of each learned stretch of tokens, under its dialogue and its place there."""
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
    if sys.argv[1:2] == ["--one"]:
        one(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1:2] == ["--compare"]:
        compare(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
