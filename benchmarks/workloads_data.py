"""The work that data benchmarks share: generated rows and lengths, a small model, and the product's own way to batches.

Everything is made from a seed, with words of a made-up language. Lengths stand for what they are named after: their
shares of padding in random batches of 32 are about 73 % (chat), 40 % (SNLI-like) and 61 % (squashed dialogues).
"""

import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from partita.data.formatting.formatter import Formatter

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ai") for c in ("", "n", "ra", "sto")]
LONGEST = 2048


def chat_lengths(count: int, chance: np.random.Generator) -> np.ndarray:
    """Chats: most short, one in twenty with a document in it."""
    long = chance.random(count) < 0.05
    found = np.exp(np.where(long, chance.normal(7, 0.25, count), chance.normal(5.4, 0.55, count)))
    return np.clip(found, 16, LONGEST).astype(np.int64)


def snli_lengths(count: int, chance: np.random.Generator) -> np.ndarray:
    """Pairs of a caption and a short claim."""
    premise, claim = np.exp(chance.normal(2.6, 0.39, count)), np.exp(chance.normal(2.0, 0.3, count))
    return np.clip(premise + claim + 3, 8, 160).astype(np.int64)


def squashed_lengths(count: int, chance: np.random.Generator) -> np.ndarray:
    """Rows of dialogues of 4 to 16 turns, each answer behind what was said before."""
    found: list[int] = []
    while len(found) < count:
        turns = np.exp(chance.normal(2.7, 0.68, int(chance.integers(2, 9)) * 2)).astype(int) + 3
        found += np.cumsum(turns)[1::2].tolist()
    return np.clip(np.array(found[:count]), 8, 1024).astype(np.int64)


LENGTHS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "chat": chat_lengths,
    "SNLI-like": snli_lengths,
    "squashed dialogues": squashed_lengths,
}


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def snli_rows(count: int, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows with a premise, a claim and a label."""
    chance = random.Random(seed)
    for number in range(count):
        premise = words(chance, max(3, round(chance.lognormvariate(2.5, 0.4))))
        claim = words(chance, max(2, round(chance.lognormvariate(1.9, 0.35))))
        label = chance.choice(("entailment", "neutral", "contradiction"))
        yield {"number": number, "premise": premise, "claim": claim, "label": label}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def shard_names(folder: Path, count: int) -> list[Path]:
    return [folder / f"part-{number:02d}.jsonl" for number in range(count)]


def write_shards(folder: Path, rows: list[dict[str, Any]], count: int) -> str:
    """The rows in so many files of like size; the glob that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(shard_names(folder, count)):
        write_rows(path, iter(rows[number::count]))
    return str(folder / "part-*.jsonl")


def make_model(folder: Path, *, vocabulary: int = 2000, context: int = LONGEST) -> Path:
    """A new Llama of 0.3 million parameters with a BPE tokenizer, in the Hugging Face layout."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    chance = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((words(chance, 50) for _ in range(400)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=context
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


SNLI_FEATURES = {
    "input_features": [{"name": "premise", "type": "text"}, {"name": "claim", "type": "text"}],
    "output_features": [{"name": "label", "type": "text"}],
    "prompt": {"template": "{premise}\n{claim}\n"},
}
"""Columns of `snli_rows`."""


def settings(model: Path, data: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A file for `snli_rows`; `changes` go into the trainer."""
    trainer: dict[str, Any] = {
        "type": "finetune",
        "learning_rate": 1e-3,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
        "skip_all_evaluation": True,
        "checkpoints_per_epoch": 0,
    } | changes
    return {"base_model": str(model), "seed": 7, **SNLI_FEATURES, "data": dict(data), "trainer": trainer}


WHOLE = {"type": "random", "probabilities": [1, 0, 0]}
"""A split that gives all rows to training."""


def with_batches(config: Mapping[str, Any], consume: Callable[[Any], None], *, run: Path) -> None:
    """Call `consume` with the batches of a run, in place of training: files, tokenizer, plan and workers are those
    that `partita train` makes."""
    from partita.model import Model
    from partita_trainers.base import TrainerContext, TrainResult
    from partita_trainers.finetune import Finetune

    train = Finetune.train

    def only_consume(trainer: Finetune, context: TrainerContext) -> TrainResult:
        consume(context.batches)
        return TrainResult(run=context.run.folder, metrics={}, steps=0)

    Finetune.train = only_consume  # type: ignore[method-assign]
    try:
        Model(config, quiet=True).train(run=run)
    finally:
        Finetune.train = train  # type: ignore[method-assign]


def an_epoch(batches: Any, rows: int) -> Iterator[Any]:
    """Steps until so many rows have come: those of an epoch, which ends with a step."""
    steps = batches.steps()
    try:
        while rows > 0:
            step = next(steps)
            rows -= sum(batch.rows for batch in step.micro_batches)
            yield step
    finally:
        steps.close()


def step_hash(step: Any) -> str:
    """A hash of all that a step holds: keys, ids, labels, lengths and positions of every batch, in their order."""
    return batches_hash(step.micro_batches)


def batches_hash(batches: Any) -> str:
    state = hashlib.blake2b(digest_size=12)
    for batch in batches:
        state.update("\0".join(batch.keys).encode())
        for name in ("input_ids_BT", "labels_BT", "lengths_B", "position_ids_BT"):
            tensor = getattr(batch, name, None)
            state.update(b"|" if tensor is None else str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return state.hexdigest()


class SlowShaper(Formatter):
    """Writes rows as the product does and takes SECONDS_A_ROW for each: `data.formatter` of slow rows."""

    def format_all(self, rows: Sequence[Any], keys: Sequence[str], *, supervised: bool = True) -> Any:
        time.sleep(float(os.environ["SECONDS_A_ROW"]) * len(rows))
        return super().format_all(rows, keys, supervised=supervised)


class Spent:
    """Seconds that a piece of work took; filled in when its context ends."""

    cpu = 0.0
    """Of this process and of those it started that have ended."""
    wall = 0.0


@contextmanager
def spending() -> Iterator[Spent]:
    spent = Spent()
    cpu, wall = cpu_seconds(), time.perf_counter()
    yield spent
    spent.cpu, spent.wall = cpu_seconds() - cpu, time.perf_counter() - wall


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def tree_memory(process: int) -> int:
    """Bytes of a process and all below it, pages that several share counted once."""
    import psutil

    total = 0
    try:
        top = psutil.Process(process)
        for one in [top, *top.children(recursive=True)]:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text(encoding="utf8").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    except (psutil.Error, OSError):
        return total
    return total
