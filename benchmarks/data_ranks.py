"""Ranks 4, 1, 2 and workers 0, 2, 1 in the middle of an epoch, beside one run that never changes.

SNLI-like rows, four batches a step. A rank is a loader with that rank, as each process of a job would make it; here all
of them live in one process, one after the other. A job stops behind a third and two thirds of an epoch and goes on with
other numbers from its position, to the end of the second epoch. Hashes of all that a step holds are compared.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, batches_hash, make_model, settings, snli_rows, with_batches, write_rows, write_shards

from partita.data.ledger import Ledger
from partita.data.loader import Loader
from partita.data.streams.loader import StreamLoader, merged
from partita.distributed.thread_group import ThreadGroup

BATCHES_OF_A_STEP = 4
JOBS = ((4, 0), (1, 2), (2, 1))
"""Ranks and workers."""
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count = 1500 if arguments.quick else 12_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(snli_rows(count))
        path = write_rows(folder / "rows.jsonl", iter(rows))
        shards = write_shards(folder / "shards", rows, 8)
        model = make_model(folder / "model")
        indexed = {"source": str(path), "split": WHOLE}
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
            config = settings(model, data, max_steps=10**6, gradient_accumulation_steps=BATCHES_OF_A_STEP)
            config["trainer"]["batch_size"] = 4 if data["batching"]["type"] == "pack" else 16
            if data["batching"]["type"] == "token_budget":
                del config["trainer"]["batch_size"]
            compared: list[Row] = []
            with_batches(config, comparison(kind, count, compared), run=folder / f"run-{number}")
            table += compared
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("rows lost or doubled", sum(row["lost"] + row["doubled"] for row in table), 0, "max"),
    ]
    report("data_ranks", table, limits, arguments=arguments, about=about(__doc__))


def comparison(kind: str, count: int, found: list[Row]) -> Callable[[Any], None]:
    def compare(batches: Any) -> None:
        fixed = list(two_epochs(job(batches, ranks=1, workers=0, cursor=None), count))
        places = [len(fixed) // 6, len(fixed) // 3, len(fixed)]
        changed: list[tuple[Any, ...]] = []
        cursor = None
        for (ranks, workers), end in zip(JOBS, places, strict=True):
            steps = job(batches, ranks=ranks, workers=workers, cursor=cursor)
            changed += islice(steps, end - len(changed))
            steps.close()
            cursor = json.loads(json.dumps(changed[-1][1]))
        keys = [key for _, _, part in changed for key in part]
        found.append(
            {
                "rows": kind,
                "steps": len(fixed),
                "changes behind steps": f"{places[0]:,}, {places[1]:,}",
                "differences": sum(a[0] != b[0] for a, b in zip(fixed, changed, strict=True)),
                "lost": 2 * count - sum(min(keys_of, 2) for keys_of in Counter(keys).values()),
                "doubled": sum(max(0, keys_of - 2) for keys_of in Counter(keys).values()),
                "cursor bytes": max(len(json.dumps(step[1])) for step in changed),
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
    batches: Any, *, ranks: int, workers: int, cursor: Any, ledgers: list[Any] | None = None
) -> Iterator[tuple[str, Any, list[str]]]:
    """Of each step of a job: hash, position and keys. Ledgers of a stream's ranks are put into `ledgers`."""
    loaders = []
    for process_group in ThreadGroup.of(ranks):
        ledger = Ledger(None, max_bad_rows=0.05)
        loaders.append(of_rank(batches, process_group=process_group, workers=workers, ledger=ledger))
        if ledgers is not None:
            ledgers.append(ledger)
    for loader in loaders:
        if cursor is not None:
            loader.load_state_dict(cursor)
    for steps in in_step(loaders):
        # Batch s of a step belongs to rank s modulo their number.
        parts = [steps[slot % ranks].micro_batches[slot // ranks] for slot in range(BATCHES_OF_A_STEP)]
        yield batches_hash(parts), one_cursor(steps), [key for batch in parts for key in batch.keys]


def in_step(loaders: list[Any]) -> Iterator[list[Any]]:
    """The next step of each loader, at once: a thread stands for each process."""
    running = [loader.steps() for loader in loaders]
    with ThreadPoolExecutor(len(loaders)) as threads:
        while True:
            yield list(threads.map(next, running))


def one_cursor(steps: Any) -> Any:
    """The position of a job: indexed, each rank knows it; of a stream, each knows its lanes."""
    cursors = [step.state_dict for step in steps]
    place = cursors[0]["place"]
    return merged(cursors) if isinstance(place, dict) and "lanes" in place else cursors[0]


def of_rank(batches: Any, *, process_group: ThreadGroup, workers: int, ledger: Ledger) -> Any:
    """The loader that a process of a job makes, from the one that a single process has made."""
    arguments, named = batches.made_with
    named = named | {"process_group": process_group}
    if isinstance(batches, StreamLoader):
        named["options"] = named["options"].model_copy(update={"workers": workers})
        named["ledger"] = ledger
    return type(batches)(*arguments, **named)


def remember_arguments() -> None:
    """Let loaders know what they were made with."""
    for kind in (Loader, StreamLoader):
        original = kind.__init__

        def remembering(self: Any, *arguments: Any, original: Any = original, **named: Any) -> None:
            self.made_with = arguments, named
            original(self, *arguments, **named)

        kind.__init__ = remembering  # type: ignore[method-assign]


if __name__ == "__main__":
    remember_arguments()
    sys.exit(main())
