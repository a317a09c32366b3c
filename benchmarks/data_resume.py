"""Seconds to the first batch after a resume at 1, 50 and 99 % of an epoch, beside skipping and a shuffle buffer.

20,000 SNLI-like rows in batches of 16. Files, tokenizer and plan are open already; measured is what depends on the
position: loading it, and the first batch. The Trainer skips batches with accelerate's `skip_first_batches`; `datasets`
loads the state of a stream with a shuffle buffer of 1,000 rows, whose rows are then counted through to the end.
partita resumes rows that are encoded (indexed), and a stream of four files with a window of 2,048 rows.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import peers_data as peers
from harness import Limit, about, parse_arguments, report
from workloads_data import (
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

SHARES = (0.01, 0.5, 0.99)
ROWS_OF_A_BATCH, BUFFER = 16, 1000
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 6000 if arguments.quick else 20_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(snli_rows(count))
        path = write_rows(folder / "rows.jsonl", iter(rows))
        shards = write_shards(folder / "shards", rows, 4)
        model = make_model(folder / "model")
        places = [max(1, int(share * count / ROWS_OF_A_BATCH)) for share in SHARES]
        found = {
            "Trainer's skip": skipped(path, model, places),
            "datasets, shuffle buffer": of_datasets(path, model, places, count),
            "partita, indexed": ours(model, {"source": str(path), "split": WHOLE}, places, folder / "indexed", count),
            "partita, stream": ours(
                model,
                {"source": {"type": "jsonl", "path": shards, "streaming": True}},
                places,
                folder / "stream",
                count,
            ),
        }
    rows_of_table = [{"resumed": name, **row} for name, measured in found.items() for row in measured]
    limits = [
        *limits_of(found["partita, indexed"], "indexed", most=0.05, slope=0.02),
        *limits_of(found["partita, stream"], "stream", most=0.5, slope=0.1),
    ]
    report("data_resume", rows_of_table, limits, arguments=arguments, about=about(__doc__))


def limits_of(rows: list[Row], name: str, *, most: float, slope: float) -> list[Limit]:
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
    loader = peers.torch_loader(dataset, batch_size=ROWS_OF_A_BATCH, workers=0)
    next(iter(peers.skip_batches(loader, 1)))
    found = []
    for place, share in zip(places, SHARES, strict=True):
        with spending() as spent:
            next(iter(peers.skip_batches(loader, place)))
        found.append(described(place, share, spent))
    return found


def of_datasets(path: Path, model: Path, places: list[int], count: int) -> list[Row]:
    """Resumed by the state of `datasets`; its rows are those before the position and those that come behind it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def opened() -> Any:
        return peers.datasets_stream([path], tokenizer, buffer=BUFFER)

    rows = opened()
    before: list[int] = []
    states = {}
    for number, row in enumerate(rows, start=1):
        before.append(row["number"])
        if number % ROWS_OF_A_BATCH == 0 and number // ROWS_OF_A_BATCH in places:
            states[number // ROWS_OF_A_BATCH] = rows.state_dict()
    found = []
    for place, share in zip(places, SHARES, strict=True):
        rows = opened()
        with spending() as spent:
            rows.load_state_dict(states[place])
            behind = iter(rows)
            part = [row["number"] for row in islice(behind, ROWS_OF_A_BATCH)]
        numbers = [*before[: place * ROWS_OF_A_BATCH], *part, *(row["number"] for row in behind)]
        lost = count - len(set(numbers))
        state = len(json.dumps(states[place]))
        doubled = len(numbers) - len(set(numbers))
        found.append(described(place, share, spent, state=state, lost=lost, doubled=doubled))
    return found


def ours(model: Path, data: Row, places: list[int], run: Path, count: int) -> list[Row]:
    """Resumed by the cursor of a step."""
    config = settings(model, data | {"batching": {"type": "bucket"}}, batch_size=ROWS_OF_A_BATCH, max_steps=10**6)
    cursors: dict[int, Any] = {}
    keys: list[list[str]] = []
    found: list[Row] = []

    def look(batches: Any) -> None:
        for number, step in enumerate(an_epoch(batches, count), start=1):
            keys.append([key for batch in step.micro_batches for key in batch.keys])
            if number in places:
                cursors[number] = json.loads(json.dumps(step.state_dict))

    with_batches(config, look, run=run)
    for place, share in zip(places, SHARES, strict=True):
        with_batches(
            config, resumed(place, share, cursors[place], keys, found), run=run.with_name(f"{run.name}{place}")
        )
    return found


def resumed(place: int, share: float, cursor: Any, keys: list[list[str]], found: list[Row]) -> Callable[[Any], None]:
    def consume(batches: Any) -> None:
        with spending() as spent:
            batches.load_state_dict(cursor)
            steps = batches.steps()
            first = next(steps)
        behind = [first, *(next(steps) for _ in range(len(keys) - place - 1))]
        steps.close()
        came = [key for step in behind for batch in step.micro_batches for key in batch.keys]
        wanted = [key for step in keys[place:] for key in step]
        lost = len(set(wanted) - set(came))
        doubled = len(came) - len(set(came)) + len(set(came) - set(wanted))
        assert lost or doubled or came == wanted
        state = len(json.dumps(cursor))
        found.append(described(place, share, spent, state=state, lost=lost, doubled=doubled))

    return consume


if __name__ == "__main__":
    sys.exit(main())
