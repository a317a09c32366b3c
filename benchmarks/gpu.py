"""On a GPU: answers and training compared with transformers, and the tuner with brute force. Reports a missing GPU.

With GPU_REHEARSAL=1, the parts for answers and training run on a CPU with a tiny model, to find mistakes in this script
before time on a GPU is spent. Their numbers mean nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fixtures import words, write_rows, zero_shot
from harness import Limit, Result, Row, call, command, main, one_thread

REHEARSAL = os.environ.get("GPU_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
NEW_TOKENS, PROMPT_TOKENS = (4, 16) if REHEARSAL else (128, 512)
ROWS = 20_000
BATCHES = (4,) if REHEARSAL else (256, 64, 1024)
WAYS = ("slots", "paged", "generate", "generate_batch")
LENGTHS = (128, 512, 2048)
MEMORY = 0.1
"""Share of the GPU that the tuner and brute force may take: the answers of a full GPU would take hours."""
STEPS, WARM_UP, BATCH = (4, 1, 2) if REHEARSAL else (24, 4, 16)
"""Optimizer steps of a training, those before its clock starts, and rows of a step."""
KINDS = ("lora", "full", "lora, 8 bits")
SECONDS = 150
"""Most seconds of one measurement, after which the next one starts."""
LAYERS, KEY_HEADS, HEAD_SIZE = (2, 2, 16) if REHEARSAL else (16, 8, 64)
PARAMETERS, KEY_BYTES = 1.24e9, 2 * LAYERS * KEY_HEADS * HEAD_SIZE * 2
"""Sizes of the model, and bytes of keys and values per token."""


def generate(folder: Path, quick: bool) -> Result:
    """Answers on a GPU compared with transformers: a new model of 1.2 billion parameters in bf16, 512 + 128 tokens.

    Needs a GPU. Batches of 256, 64 and 1,024 rows, in slots, with a paged KV cache whose steps are CUDA graphs, by
    `generate` of transformers over a batch, and by its continuous batching; then the size that the tuner chooses.
    Tokens per second, and their fraction of the limits of the machine: prompts at its measured rate of matrix products,
    decode steps at its measured bandwidth, weights and keys read once per step. `equal` is the number of rows whose
    tokens are those of `generate` for rows alone, of the first eight.
    """
    call(make_model, folder)
    cases = [(way, batch) for batch in (BATCHES[:1] if quick else BATCHES) for way in WAYS]
    cases += [] if REHEARSAL else [("tuned", 0)]
    rows = [measured(measure_answers, folder, way, batch, way=way, batch=batch) for way, batch in cases]
    shares = {row["way"]: row["share of the machine"] for row in rows if row.get("rows at a time") == BATCHES[0]}
    own = max(shares.get("slots", 0.0), shares.get("paged", 0.0))
    return rows, [Limit(f"share of the machine, {BATCHES[0]} rows", own, 0.5, "min")]


def train(folder: Path, quick: bool) -> Result:
    """Training on a GPU compared with transformers' Trainer: a new model of 1.2 billion parameters in bf16.

    Needs a GPU. Steps of 16 rows with 128 to 896 tokens, 512 on average, in random order, loss on all tokens of the
    answer: LoRA with r 16 on all linear layers, all weights, and LoRA on 8-bit weights. Real tokens per second, and
    their fraction of the measured rate of matrix products: six operations per parameter and token for all weights, four
    for an adapter.
    """
    call(make_model, folder)
    call(make_rows, folder)
    cases = [(way, kind) for kind in (KINDS[:1] if quick else KINDS) for way in ("partita", "Trainer")]
    rows = [measured(measure_training, folder, way, kind, way=way, kind=kind) for way, kind in cases]
    rates = {(row["way"], row["kind"]): row.get("tokens/s", 0) for row in rows}
    limits = [
        Limit(f"{kind}, over Trainer", rates["partita", kind] / (rates["Trainer", kind] or 1), 1.0, "min")
        for kind in dict.fromkeys(kind for _, kind in cases)
    ]
    return rows, limits


def tuner(folder: Path, quick: bool) -> Result:
    """The tuner on a GPU compared with brute force: a new model of 1.2 B parameters in bf16, three prompt lengths.

    Needs a GPU, of which a tenth of the memory is used. For prompts of 128, 512 and 2,048 tokens and 128 new ones: the
    largest batch that generates all of its tokens, found by trying, compared with the tuner's result; the time of the
    probes; and whether a job continues after a batch that did not fit. All of it with and without expandable segments.
    """
    call(make_model, folder)
    rows: list[Row] = []
    for segments in ("True",) if quick else ("True", "False"):
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{segments}"
        for length in LENGTHS[:1] if quick else LENGTHS:
            case = {"expandable segments": segments == "True", "prompt tokens": length}
            rows.append(measured(measure_tuner, folder, length, **case))
    found = [row for row in rows if "failed" not in row]
    limits = [
        Limit("measurements that failed", len(rows) - len(found), 0, "max"),
        Limit("share of what truly fits, least", min((row["share"] for row in found), default=0.0), 0.94, "min"),
        Limit("share of what truly fits, most", max((row["share"] for row in found), default=0.0), 1.0, "max"),
        Limit(
            "batches that did not fit, least",
            min((row["batches that did not fit"] for row in found), default=0),
            1,
            "min",
        ),
        Limit("rows lost after a batch that did not fit", sum(row["lost"] for row in found), 0, "max"),
    ]
    return rows, limits


def measured(function: Callable[..., Row], *arguments: Any, **case: Any) -> Row:
    """Call a function in a new process; print and return its row.

    If the function fails or takes too long, the row has the reason.

    Args:
        function: A function of this script.
        arguments: Its arguments.
        case: Columns that name what is measured.
    """
    words = command(function, *arguments)
    try:
        done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        row = case | {"failed": f"not done after {SECONDS} s"}
    else:
        said = (done.stderr if done.returncode else done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        row = case | ({"failed": said[-1]} if done.returncode else json.loads(said[-1]))
    print(json.dumps(row), flush=True)  # the rows so far, should the machine be taken away
    return row


def make_model(folder: str) -> None:
    """Save a Llama with 1.24 billion random weights and a byte tokenizer. Exits without a GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from partita.tokenizers.load import byte_tokenizer

    if not (REHEARSAL or torch.cuda.is_available()):
        sys.exit("not run: torch sees no GPU here")
    sizes = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
    if REHEARSAL:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes,
        num_hidden_layers=LAYERS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    # Otherwise the embedding of a token outweighs the layers, and every answer repeats the last token of its prompt.
    model.get_input_embeddings().weight.data *= 0.02
    model.save_pretrained(f"{folder}/model")
    byte_tokenizer(max_length=8192).save_pretrained(f"{folder}/model")


def make_rows(folder: str) -> None:
    """Save rows for training, of a prompt and an answer of half its length."""
    import random

    rng, rows = random.Random(0), []
    for _ in range((STEPS + 1) * BATCH):
        tokens = rng.randint(*((16, 64) if REHEARSAL else (128, 896)))
        text = words(rng, tokens)[:tokens]
        rows.append({"question": text[: tokens * 2 // 3], "answer": text[tokens * 2 // 3 :]})
    write_rows(Path(folder, "rows.jsonl"), rows)


def load(folder: str, *, kv_cache: str = "slots") -> Any:
    """Return partita's model for answers of a fixed length."""
    from partita.model import Model

    config = zero_shot(f"{folder}/model", "prompt response", tokens=NEW_TOKENS, model_parameters={"dtype": "bfloat16"})
    config["generation"] |= {"min_new_tokens": NEW_TOKENS, "kv_cache": kv_cache}
    return Model(config, quiet=True)


def answer_in_slots(pipeline: Any, prompts: list[list[int]], rows: int) -> tuple[list[Any], Any]:
    """Return answers generated in `rows` slots, and the budget, which records memory errors."""
    from partita.generation.generator import generate_requests
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings
    from partita.lm.base import GenerationRequest

    requests = [GenerationRequest(ids, NEW_TOKENS) for ids in prompts]
    held = BatchBudget(rows)
    found = generate_requests(pipeline.lm, requests, GenerationSettings(pipeline.generation, held, 0))
    return found, held


def measure_tuner(folder: str, length: int) -> Row:
    """Return the tuner's result and the true maximum, in one process: a GPU recovers from memory errors."""
    import torch

    from partita_schema.errors import OutOfMemory

    torch.cuda.set_per_process_memory_fraction(MEMORY)
    model = load(folder)
    pipeline = model._backend.pipeline()
    os.environ["PARTITA_CACHE"] = f"{folder}/cache"
    started = time.perf_counter()
    found = model._backend.tuner.generation(np.full(ROWS, length))
    seconds = time.perf_counter() - started
    fits = found.max_fitting or 0

    def runs(rows: int) -> bool:
        ids = np.random.default_rng(rows).integers(5, 250, (rows, length)).tolist()
        try:
            return not answer_in_slots(pipeline, ids, rows)[1].out_of_memory
        except OutOfMemory:
            return False
        finally:
            torch.cuda.empty_cache()

    low, high = (fits, 2 * fits) if runs(fits) else (0, fits)
    while runs(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    questions = [{"prompt": f"{row:08}".ljust(length - 8, "x")} for row in range(2 * high + 1)]
    os.chdir(folder)
    stats = model.predict(questions, batch_size=2 * high, fresh=True).stats
    return {
        "tuner": fits,
        "truth": low,
        "share": round(fits / low, 4),
        "chosen": found.rows,
        "probes": len(found.probes),
        "out of memory in probes": sum(probe.verdict == "out of memory" for probe in found.probes),
        "tuning s": round(seconds, 2),
        "rows/s predicted": round(dict(found.throughputs).get(found.rows, 0.0), 1),
        "batches that did not fit": stats.out_of_memory,
        "lost": stats.rows - stats.ok,
    }


def measure_answers(folder: str, way: str, batch: int) -> Row:
    """Answer `batch` rows, at least 256, after a warm-up; return the row of the table."""
    if way in ("slots", "paged", "tuned"):
        answer, batch = in_slots(folder, batch, kv_cache="paged" if way == "paged" else "slots")
    else:
        answer = by_the_library(folder, way, batch)
    count = max(BATCHES[0], batch)
    prompts = np.random.default_rng(0).integers(5, 250, (count, PROMPT_TOKENS)).tolist()
    alone = by_the_library(folder, "generate", 1)(prompts[:8])
    answer(prompts[: max(2, batch // 8)])
    begin_memory()
    started = now()
    found = answer(prompts)
    seconds = now() - started
    tokens = sum(map(len, found))
    return {
        "rows at a time": batch,
        "rows": count,
        "tokens/s": round(tokens / seconds),
        "seconds": round(seconds, 2),
        "share of the machine": round(least_seconds(count, batch) / seconds, 3),
        "peak GB": peak_gigabytes(),
        "equal": sum(one == other for one, other in zip(found, alone, strict=False)),
    }


Answer = Callable[[list[list[int]]], list[list[int]]]
"""Returns the new tokens of each prompt, in order."""


def in_slots(folder: str, batch: int, *, kv_cache: str) -> tuple[Answer, int]:
    """Return a function that answers in slots, and their number; 0 means the number chosen by the tuner."""
    model = load(folder, kv_cache=kv_cache)
    pipeline = model._backend.pipeline()
    rows = batch or model._backend.tuner.generation(np.full(ROWS, PROMPT_TOKENS)).rows

    def answer(chosen: list[list[int]]) -> list[list[int]]:
        return [list(one.ids) for one in answer_in_slots(pipeline, chosen, rows)[0]]

    return answer, rows


def by_the_library(folder: str, way: str, batch: int) -> Answer:
    """Return a function that answers with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.bfloat16).to(DEVICE).eval()
    limit = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}

    def static(chosen: list[list[int]]) -> list[list[int]]:
        answers: list[list[int]] = []
        with torch.inference_mode():
            for start in range(0, len(chosen), batch):
                ids = torch.tensor(chosen[start : start + batch], device=DEVICE)
                found = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limit)
                answers += found[:, PROMPT_TOKENS:].tolist()
        return answers

    def continuous(chosen: list[list[int]]) -> list[list[int]]:
        options = GenerationConfig(eos_token_id=2, pad_token_id=0, **limit)
        found = model.generate_batch(chosen, generation_config=options, progress_bar=False)
        by_prompt = {tuple(one.prompt_ids): list(one.generated_tokens) for one in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in chosen]

    return static if way == "generate" else continuous


def measure_training(folder: str, way: str, kind: str) -> Row:
    """Train for `STEPS` steps; return the row of the table."""
    begin_memory()
    tokens, seconds = (train_partita if way == "partita" else train_by_trainer)(folder, kind)
    operations = (6 if kind == "full" else 4) * PARAMETERS * tokens
    return {
        "tokens/s": round(tokens / seconds),
        "seconds a step": round(seconds / (STEPS - WARM_UP), 3),
        "share of the machine": round(operations / rate_of_products() / seconds, 3),
        "peak GB": peak_gigabytes(),
    }


class Clock:
    """Notes when steps end: a callback of partita, which a callback of the Trainer calls too."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, state: Any) -> None:
        """Note the end of a step."""
        self.times.append(now())

    @property
    def seconds(self) -> float:
        """Seconds of the steps after the warm-up."""
        return self.times[STEPS - 1] - self.times[WARM_UP - 1]


def train_partita(folder: str, kind: str) -> tuple[int, float]:
    """Train with partita; return tokens and seconds after the warm-up."""
    from fixtures import log_of

    from partita.model import Model

    config: Row = {
        "base_model": f"{folder}/model",
        "model_parameters": {"dtype": "bfloat16"},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"source": f"{folder}/rows.jsonl", "split": {"type": "random", "probabilities": [1, 0, 0]}},
        "trainer": {
            "type": "finetune",
            "batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-5,
            "learning_rate_scheduler": {"decay": "none"},
            "skip_all_evaluation": True,
            "checkpoints_per_epoch": 0,
        },
    }
    config["data"]["batching"] = {"type": "fixed"}
    if kind != "full":
        config["adapter"] = {"type": "lora", "r": 16}
    if "8 bits" in kind:
        config["quantization"] = {"bits": 8}
    clock, run = Clock(), Path(folder, "runs", kind)
    Model(config, quiet=True).train(run=run, callbacks=[clock])
    return sum(step["tokens"] for step in log_of(run)[WARM_UP:]), clock.seconds


def train_by_trainer(folder: str, kind: str) -> tuple[int, float]:
    """Train with transformers' Trainer; return tokens and seconds after the warm-up."""
    import torch
    from fixtures import read_rows
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(f"{folder}/model")
    data = []
    for row in read_rows(Path(folder, "rows.jsonl")):
        question, answer = (tokenizer(row[name])["input_ids"] for name in ("question", "answer"))
        answer = [*answer, tokenizer.eos_token_id]
        data.append({"input_ids": question + answer, "labels": [-100] * len(question) + answer})
    counted: list[int] = []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        counted.append(sum(len(row["input_ids"]) for row in rows))
        fills = {"input_ids": 0, "labels": -100}
        batch = {
            key: torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])
            for key, fill in fills.items()
        }
        lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
        return batch | {"attention_mask": (torch.arange(width) < lengths).long()}

    class Times(TrainerCallback):
        def on_step_end(self, *given: Any, **more: Any) -> None:
            clock.on_step(None)

    clock = Clock()
    model: Any = AutoModelForCausalLM.from_pretrained(
        f"{folder}/model",
        dtype=torch.float32 if kind == "full" else torch.bfloat16,
        device_map={"": DEVICE} if "8 bits" in kind else None,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True) if "8 bits" in kind else None,
    )
    if "8 bits" in kind:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if kind != "full":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=not REHEARSAL,
        use_cpu=REHEARSAL,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Times()]).train()
    return sum(counted[WARM_UP:STEPS]), clock.seconds


# The machine


def now() -> float:
    """Return the time after all work of the GPU."""
    import torch

    if not REHEARSAL:
        torch.cuda.synchronize()
    return time.perf_counter()


def begin_memory() -> None:
    """Start to measure the peak of memory."""
    import torch

    if not REHEARSAL:
        torch.cuda.reset_peak_memory_stats()


def peak_gigabytes() -> float:
    """Return the peak of memory since `begin_memory`."""
    import torch

    return 0.0 if REHEARSAL else round(torch.cuda.max_memory_allocated() / 1e9, 1)


def least_seconds(rows: int, batch: int) -> float:
    """Return the minimum seconds: prompts at the machine's rate of matrix products, steps at its bandwidth."""
    import torch

    wide = torch.empty(2**20 if REHEARSAL else 2**30, device=DEVICE, dtype=torch.uint8)
    bandwidth = 2 * wide.numel() / timed(wide.clone)
    read = 2 * PARAMETERS * rows * PROMPT_TOKENS / rate_of_products()
    held = batch * (PROMPT_TOKENS + NEW_TOKENS / 2) * KEY_BYTES
    return float(read + rows / batch * NEW_TOKENS * (2 * PARAMETERS + held) / bandwidth)


def rate_of_products() -> float:
    """Return the operations per second of a large matrix product in bf16."""
    import torch

    size = 128 if REHEARSAL else 8192
    left = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return float(2 * size**3 / timed(lambda: left @ left))


def timed(work: Any) -> float:
    """Return the mean seconds of ten runs, after three warm-up runs."""
    for _ in range(3):
        work()
    started = now()
    for _ in range(10):
        work()
    return (now() - started) / 10


if __name__ == "__main__":
    main(generate, train, tuner)
