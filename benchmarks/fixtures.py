"""Rows, models, configs and clocks shared by several benchmarks.

Everything is generated from a seed, with words of an artificial language. The imports are light: the imports of a
peer's process are part of its memory.
"""

import hashlib
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Row

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ai") for c in ("", "n", "ra", "sto")]
LONGEST = 2048
TRL = "1.16.0"
"""Version of the peer of several benchmarks."""


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def snli_rows(count: int, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows with a premise, a claim and a label."""
    rng = random.Random(seed)
    for number in range(count):
        premise = words(rng, max(3, round(rng.lognormvariate(2.5, 0.4))))
        claim = words(rng, max(2, round(rng.lognormvariate(1.9, 0.35))))
        label = rng.choice(("entailment", "neutral", "contradiction"))
        yield {"number": number, "premise": premise, "claim": claim, "label": label}


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    with path.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def shard_names(folder: Path, count: int) -> list[Path]:
    return [folder / f"part-{number:02d}.jsonl" for number in range(count)]


def write_shards(folder: Path, rows: list[dict[str, Any]], count: int) -> str:
    """Write the rows into `count` files of similar size; return their glob pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(shard_names(folder, count)):
        write_rows(path, iter(rows[number::count]))
    return str(folder / "part-*.jsonl")


def make_model(folder: Path, *, vocabulary: int = 2000, context: int = LONGEST) -> Path:
    """Save a new Llama of 0.3 million parameters with a BPE tokenizer in the Hugging Face layout."""
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
    rng = random.Random(0)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((words(rng, 50) for _ in range(400)), trainer)
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
    """Return a config for `snli_rows`; `changes` are trainer keys. A token budget replaces the batch size."""
    trainer: dict[str, Any] = {
        "type": "finetune",
        "learning_rate": 1e-3,
        "batch_size": 32,
        "gradient_accumulation_steps": 1,
        "skip_all_evaluation": True,
        "checkpoints_per_epoch": 0,
    } | changes
    if data.get("batching", {}).get("type") == "token_budget":
        del trainer["batch_size"]
    return {"base_model": str(model), "seed": 7, **SNLI_FEATURES, "data": dict(data), "trainer": trainer}


WHOLE = {"type": "random", "probabilities": [1, 0, 0]}
"""A split that uses all rows for training."""


WORD_MODEL = {"type": "scratch", "size": "tiny", "tokenizer": "word", "vocab_size": 256, "context_length": 128}
"""A new model of 5 million parameters with a word tokenizer."""


def zero_shot(model: Any, columns: str, *, tokens: int, **changes: Any) -> Row:
    """Return a config for prediction without training.

    Args:
        model: `base_model`.
        columns: Names of the input and the output column, with a space between them.
        tokens: Maximum number of new tokens.
        changes: Further sections; `trainer` is merged into the one without training.
    """
    question, answer = columns.split()
    return {
        "base_model": model,
        "input_features": [{"name": question, "type": "text"}],
        "output_features": [{"name": answer, "type": "text"}],
        "generation": {"max_new_tokens": tokens},
        **changes,
        "trainer": {"type": "none", **changes.get("trainer", {})},
    }


def log_of(run: Path) -> list[Row]:
    """Return the steps of a run."""
    return read_rows(run / "log.jsonl")


def steps_of(run: Path) -> list[Row]:
    """Return the steps of a run without their seconds, for comparison with another run."""
    return [step | {"seconds": None} for step in log_of(run)]


def count_differences(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of positions at which two sequences differ, including positions in only one of them."""
    return abs(len(one) - len(other)) + sum(a != b for a, b in zip(one, other, strict=False))


def with_batches(config: Mapping[str, Any], consume: Callable[[Any], None], *, run: Path) -> None:
    """Call `consume` with the batches of a run instead of training; files, tokenizer, plan and workers are those of
    `partita train`."""
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
    """Yield the steps of an epoch of `rows` rows, which ends with a complete step."""
    steps = batches.steps()
    try:
        while rows > 0:
            step = next(steps)
            rows -= sum(batch.rows for batch in step.micro_batches)
            yield step
    finally:
        steps.close()


def batches_hash(batches: Any) -> str:
    state = hashlib.blake2b(digest_size=12)
    for batch in batches:
        state.update("\0".join(batch.keys).encode())
        for name in ("input_ids_BT", "labels_BT", "lengths_B", "position_ids_BT"):
            tensor = getattr(batch, name, None)
            state.update(b"|" if tensor is None else str(tuple(tensor.shape)).encode() + tensor.numpy().tobytes())
    return state.hexdigest()


class Spent:
    """Seconds of some work, set at the end of its context."""

    cpu = 0.0
    """CPU seconds of this process and of its ended children."""
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


def train_timed(config: Mapping[str, Any], data: Any = None) -> tuple[list[Row], Spent]:
    """Train on one thread; return the log of the run, and the seconds of its training loop."""
    import torch

    from partita.model import Model
    from partita_trainers.finetune_run import FinetuneRun

    torch.set_num_threads(1)
    loops: list[Spent] = []
    train_loop = FinetuneRun.train_loop

    def timed(training: FinetuneRun) -> None:
        with spending() as spent:
            train_loop(training)
        loops.append(spent)

    FinetuneRun.train_loop = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as place:
            result = Model(config, quiet=True).train(data, run=Path(place) / "run")
            log = log_of(result.run)
    finally:
        FinetuneRun.train_loop = train_loop  # type: ignore[method-assign]
    (spent,) = loops
    return log, spent


def tree_memory(process: int) -> int:
    """Return the bytes of a process and all its children, shared pages counted once."""
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
