"""AllenNLP's table of its move to torch's loader, again: 30 batches of 32 SNLI-like rows, plain and slow.

Seconds to read, encode and collate 960 rows of a JSONL file in the order of the file, from asking for the first batch
on, starting of workers included, to the end of the workers: mean and deviation of 5. Slow rows take a further 0.01 s
each; without workers they are run once. partita reads a stream. AllenNLP's own numbers, of another machine and its own
tokenizer, stand beside.

960 plain rows are done before processes have started, whoever starts them. Whether workers pay for plain rows is told
of ten times as many, which take about as long as AllenNLP's did; how long starting takes, by the first batch.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_data as peers
from harness import Limit, about, parse_arguments, report
from workloads_data import an_epoch, make_model, settings, snli_rows, spending, with_batches, write_rows

ROWS, ROWS_OF_A_BATCH = 960, 32
MANY = 10 * ROWS
ALLENNLP = {
    ("plain", 0): 0.543,
    ("plain", 2): 0.353,
    ("plain", 5): 0.203,
    ("slow", 0): 12.475,
    ("slow", 2): 6.328,
    ("slow", 5): 2.761,
}
"""Seconds that its release notes give for torch's loader."""
Times = tuple[float, float, float]
"""Seconds: CPU, wall, and wall to the first batch."""
Found = dict[tuple[str, str, int], list[Times]]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    rounds, slow = (1, 0.001) if arguments.quick else (5, 0.01)
    found: Found = {}
    kinds = {"plain": (ROWS, 0.0), "plain, many": (MANY, 0.0), "slow": (ROWS, slow)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {count: write_rows(folder / f"{count}.jsonl", snli_rows(count)) for count in (ROWS, MANY)}
        model = make_model(folder / "model")
        contenders: dict[str, Callable[[int, int, float], Times]] = {
            "torch DataLoader": lambda *asked: of_peer(peers.torch_loader, paths, model, *asked),
            "StatefulDataLoader": lambda *asked: of_peer(peers.stateful_loader, paths, model, *asked),
            "partita": lambda *asked: of_ours(paths, model, *asked),
        }
        for measure in contenders.values():
            measure(ROWS, 0, 0.0)  # imports, and files that the system keeps in memory
        for kind, (count, delay) in kinds.items():
            for _ in range(rounds):
                for workers in (0, 2, 5):
                    for name, measure in contenders.items():
                        times = found.setdefault((name, kind, workers), [])
                        if not (times and delay and not workers):
                            times.append(measure(count, workers, delay))
    report("data_allennlp_table", table(found), limits(found, slow), arguments=arguments, about=about(__doc__))


def of_peer(make: Any, paths: dict[int, Path], model: Path, count: int, workers: int, delay: float) -> Times:
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


def of_ours(paths: dict[int, Path], model: Path, count: int, workers: int, delay: float) -> Times:
    os.environ["SECONDS_A_ROW"] = str(delay)
    data: dict[str, Any] = {
        "source": {"type": "jsonl", "path": str(paths[count]), "streaming": True},
        "batching": {"type": "fixed", "shuffle": False},
        "loader": {"workers": workers},
    }
    if delay:
        data["formatter"] = "workloads_data:SlowShaper"
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


def table(found: Found) -> list[dict[str, Any]]:
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


def limits(found: Found, slow: float) -> list[Limit]:
    """Slow rows have a limit where they are as slow as AllenNLP's: not in the quick run."""
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
    return made


if __name__ == "__main__":
    sys.exit(main())
