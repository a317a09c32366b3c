"""An epoch with rows encoded on the fly beside tokens made before: seconds, and bytes on disk.

8,000 SNLI-like rows in batches of 32 in the order of the file; a tiny Llama (128 wide, two layers, one thread) learns
in the same process. Made before: by `datasets.map` into its cache, and by partita with `encode: cache`; making them is
not part of the epoch. On the fly: a stream, without workers and with two. In turn, medians of three.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_data as peers
from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, an_epoch, make_model, settings, snli_rows, spending, with_batches, write_rows

ROWS_OF_A_BATCH = 32
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count, rounds = (2400, 1) if arguments.quick else (8000, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PARTITA_CACHE"] = str(folder / "cache" / "partita")
        path = write_rows(folder / "rows.jsonl", snli_rows(count))
        model = make_model(folder / "model")
        learn = learner()
        made, seconds = map_rows(path, model, folder / "cache" / "datasets")
        contenders: dict[str, Callable[[int], tuple[float, float]]] = {
            "datasets.map": lambda rows: of_datasets(made, learn),
            "partita, encode: cache": lambda rows: ours(folder, model, cached(path), rows, learn),
            "partita, stream, 0 workers": lambda rows: ours(folder, model, streamed(path, 0), rows, learn),
            "partita, stream, 2 workers": lambda rows: ours(folder, model, streamed(path, 2), rows, learn),
        }
        before = {"datasets.map": (seconds, size(folder / "cache"))}
        for contender in list(contenders)[1:]:
            start = size(folder / "cache")
            contenders[contender](ROWS_OF_A_BATCH)  # imports, and what is made before
            before[contender] = (0.0, size(folder / "cache") - start)
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
    report("data_encode", rows, limits, arguments=arguments, about=about(__doc__))


def learner() -> Callable[[Any, Any], None]:
    """A step of training."""
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
    """Rows whose tokens `datasets` has written down, and the seconds that took."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    with spending() as spent:
        made = rows.map(lambda row: {"input_ids": peers.encode(row, tokenizer)}, remove_columns=rows.column_names)
    return made, spent.wall


def of_datasets(rows: Any, learn: Callable[[Any, Any], None]) -> tuple[float, float]:
    with spending() as spent:
        for start in range(0, len(rows), ROWS_OF_A_BATCH):
            batch = peers.pad(rows[start : start + ROWS_OF_A_BATCH]["input_ids"])
            learn(batch["input_ids"], batch["labels"])
    return spent.cpu, spent.wall


def cached(path: Path) -> Row:
    return {"source": str(path), "split": WHOLE, "encode": "cache"}


def streamed(path: Path, workers: int) -> Row:
    return {"source": {"type": "jsonl", "path": str(path), "streaming": True}, "loader": {"workers": workers}}


def ours(folder: Path, model: Path, data: Row, rows: int, learn: Callable[[Any, Any], None]) -> tuple[float, float]:
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


if __name__ == "__main__":
    sys.exit(main())
