"""Data layers to compare with: thin uses of other libraries, and the batching algorithms of two more.

`torch_loader`, `stateful_loader`, `datasets_stream`, `skip_batches` and `group_by_length` call torch, torchdata,
datasets, accelerate and transformers as their users do. AllenNLP and ParlAI can no longer be installed together with
them: their batching of lengths is reimplemented here from their published sources (AllenNLP 2.10, samplers; ParlAI 1.7,
dynamic batching; ParlAI 2018, the batch cache of its torch data teacher), in a few lines each.
"""

import json
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# More workers than cores are intended; torchdata's last release calls functions that torch has deprecated since.
warnings.filterwarnings("ignore", message="This DataLoader will create")
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")

Lengths = np.ndarray
Batch = list[int]


class TextRows(IterableDataset[list[int]]):
    """Token ids of each line of a JSONL file, read, formatted and encoded when it is requested.

    Every worker reads all lines and encodes its share. `delay` seconds pass for each encoded row.
    """

    def __init__(self, path: Path, tokenizer: Any, *, delay: float = 0.0) -> None:
        self.path, self.tokenizer, self.delay = path, tokenizer, delay

    def __iter__(self) -> Iterator[list[int]]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        with self.path.open("rb") as file:
            for place, line in enumerate(file):
                if place % count == number:
                    if self.delay:
                        time.sleep(self.delay)
                    yield encode(json.loads(line), self.tokenizer)


def encode(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return premise and claim on separate lines, and the label with an end token: partita's tokens for the row."""
    ids = tokenizer([f"{row['premise']}\n{row['claim']}\n", row["label"]], add_special_tokens=False)["input_ids"]
    return [*ids[0], *ids[1], tokenizer.eos_token_id]


def pad(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Pad rows on the right, and add labels."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), -100, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = labels[place, : len(row)] = torch.tensor(row)
    return {"input_ids": ids, "labels": labels, "lengths": torch.tensor([len(row) for row in rows])}


def torch_loader(dataset: Any, *, batch_size: int, workers: int) -> Any:
    """Return torch's DataLoader over rows in order."""
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=pad)


def stateful_loader(dataset: Any, *, batch_size: int, workers: int) -> Any:
    """Return torchdata's loader with a state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=pad)


def datasets_stream(files: Sequence[Path], tokenizer: Any, *, buffer: int, seed: int = 0) -> Any:
    """Return rows of JSONL files through a shuffle buffer of `datasets`, encoded."""
    from datasets import load_dataset

    rows = load_dataset("json", data_files=[str(path) for path in files], split="train", streaming=True)
    return rows.shuffle(seed=seed, buffer_size=buffer).map(lambda row: {"input_ids": encode(row, tokenizer)})


def skip_batches(loader: Any, number: int) -> Any:
    """Skip batches as the Hugging Face Trainer does when it resumes."""
    from accelerate import skip_first_batches

    return skip_first_batches(loader, number)


def in_random_order(lengths: Lengths, *, batch_size: int, seed: int) -> list[Batch]:
    """Return a permutation, split into batches."""
    return cut(np.random.default_rng(seed).permutation(len(lengths)).tolist(), batch_size)


def group_by_length(lengths: Lengths, *, batch_size: int, seed: int) -> list[Batch]:
    """Return the batches of the Trainer's sampling strategy `group_by_length`."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    return cut(get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator), batch_size)


def allennlp_bucket(lengths: Lengths, *, batch_size: int, seed: int, noise: float = 0.1) -> list[Batch]:
    """Sort all rows by their length, each with noise of up to 10 %; split; shuffle the batches."""
    rng = random.Random(seed)
    batches = cut(noisy_order(lengths, noise, rng), batch_size)
    rng.shuffle(batches)
    return batches


def allennlp_max_tokens(lengths: Lengths, *, max_tokens: int, seed: int, noise: float = 0.1) -> list[Batch]:
    """Sort as `allennlp_bucket`, and end a batch when one more row would make it too large; an empty batch precedes a
    first row that is too long for any batch."""
    rng = random.Random(seed)
    batches: list[Batch] = []
    batch: Batch = []
    longest = 0
    for row in noisy_order(lengths, noise, rng):
        if max(longest, lengths[row]) * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch, longest = [], 0
        batch.append(row)
        longest = max(longest, int(lengths[row]))
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def noisy_order(lengths: Lengths, noise: float, rng: random.Random) -> list[int]:
    noisy = [length + rng.uniform(-length * noise, length * noise) for length in lengths.tolist()]
    return sorted(range(len(noisy)), key=noisy.__getitem__)


def parlai_batch_cache(
    lengths: Lengths, *, batch_size: int, seed: int, spread: int = 5, least: int = 1000, most: int = 10_000
) -> list[Batch]:
    """Return the number of batches of an epoch, by ParlAI's cache in its `pop` mode.

    Rows go to the first bucket at most `spread` - 1 tokens away. While rows arrive, batches leave random buckets;
    after the last row, earlier batches are chosen repeatedly, so that rows are repeated and lost.
    """
    rng = random.Random(seed)
    buckets: dict[int, Batch] = {}
    made: list[Batch] = []
    served: list[Batch] = []
    waiting, cached = iter(range(len(lengths))), 0
    wanted = -(-len(lengths) // batch_size)
    ended = False
    while len(served) < wanted:
        while not ended and (cached <= least or not full_buckets(buckets, batch_size)) and cached < most:
            row = next(waiting, None)
            if row is None:
                ended = True
                made += cut([row for length in sorted(buckets) for row in buckets[length]], batch_size)
                break
            near_bucket(buckets, int(lengths[row]), spread).append(row)
            cached += 1
        if ended:
            served.append(rng.choice(made))
            continue
        full = full_buckets(buckets, batch_size)
        length = rng.choice(full or [max(buckets, key=lambda length: len(buckets[length]))])
        batch, buckets[length] = buckets[length][:batch_size], buckets[length][batch_size:]
        cached -= len(batch)
        made.append(batch)
        served.append(batch)
    return served


def full_buckets(buckets: dict[int, Batch], batch_size: int) -> list[int]:
    return [length for length, rows in buckets.items() if len(rows) >= batch_size]


def near_bucket(buckets: dict[int, Batch], length: int, spread: int) -> Batch:
    near = [length, *(other for i in range(1, spread) for other in (length + i, length - i))]
    found = next((other for other in near if max(other, 1) in buckets), length)
    return buckets.setdefault(max(found, 1), [])


def parlai_dynamic(lengths: Lengths, *, max_tokens: int, seed: int, buffer: int = 1021) -> list[Batch]:
    """Batch as ParlAI's full dynamic batching: a sorted buffer of 1,021 rows; downwards from a random position, as many
    rows as fit the budget with widths and sizes in multiples of 8, less those above a multiple of 4."""
    rng = random.Random(seed)
    waiting = iter(range(len(lengths)))
    held: list[int] = []
    batches: list[Batch] = []
    widths = [-(-length // 8) * 8 for length in lengths.tolist()]
    while True:
        held += islice(waiting, buffer - len(held))
        if not held:
            return batches
        held.sort(key=lambda row: (widths[row], rng.random()))
        place = rng.randrange(len(held))
        while place < len(held) - 1 and widths[held[place]] == widths[held[place + 1]]:
            place += 1
        batch: Batch = []
        width = 0
        while held:
            new_width, new_size = max(width, widths[held[place]]), -(-(len(batch) + 1) // 8) * 8
            if batch and (new_width * new_size > max_tokens or new_size > buffer):
                break
            width = new_width
            batch.append(held.pop(place))
            place = max(place - 1, 0)
        while len(batch) > 4 and len(batch) % 4:
            held.append(batch.pop())
        batches.append(batch)


def cut(rows: Sequence[int], size: int) -> list[Batch]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
