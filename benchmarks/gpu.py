"""On a GPU: the tuner compared with brute force, and answers compared with transformers. Reports a missing GPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fixtures import zero_shot
from harness import Limit, Result, Row, call, command, main, one_thread

NEW_TOKENS = 128
LENGTHS = (128, 512, 2048)
ROWS = 20_000
PROMPT_TOKENS = 512
BATCHES = (64, 256, 1024)
WAYS = ("generate", "generate_batch", "slots")
PARAMETERS, KEY_BYTES = 1.24e9, 2 * 16 * 8 * 64 * 2
"""Sizes of the model, and bytes of keys and values per token."""


def tuner(folder: Path, quick: bool) -> Result:
    """The tuner on a GPU compared with brute force: a new model of 1.2 B parameters in bf16, three prompt lengths.

    Needs a GPU. For prompts of 128, 512 and 2,048 tokens and 128 new ones: the largest batch that generates all of its
    tokens, found by trying, compared with the tuner's result; the time of the probes; and whether a job continues after
    a batch that did not fit. All of it with and without expandable segments.
    """
    make_model(folder)
    rows: list[Row] = []
    for segments in ("True",) if quick else ("True", "False"):
        os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{segments}"
        for length in LENGTHS[:1] if quick else LENGTHS:
            rows.append({"expandable segments": segments == "True", **call(measure_tuner, folder, length)})
            print(rows[-1], flush=True)
    limits = [
        Limit("share of what truly fits, least", min(row["share"] for row in rows), 0.94, "min"),
        Limit("share of what truly fits, most", max(row["share"] for row in rows), 1.0, "max"),
        Limit("batches that did not fit, least", min(row["batches that did not fit"] for row in rows), 1, "min"),
        Limit("rows lost after a batch that did not fit", sum(row["lost"] for row in rows), 0, "max"),
    ]
    return rows, limits


def generate(folder: Path, quick: bool) -> Result:
    """Answers on a GPU compared with transformers: a new model of 1.2 billion parameters in bf16, 512 + 128 tokens.

    Needs a GPU. Batches of 64, 256 and 1,024 rows, by `generate` of transformers over a batch, by its continuous
    batching, and in slots; then the size that the tuner chooses. Tokens per second, and their fraction of the limits of
    the machine: prompts at its measured rate of matrix products, decode steps at its measured bandwidth, weights and
    keys read once per step.
    """
    make_model(folder)
    rows: list[Row] = []
    cases = [(way, batch) for batch in (BATCHES[:1] if quick else BATCHES) for way in WAYS]
    for way, batch in [*cases, ("tuned", 0)]:
        words = command(measure_answers, folder, way, batch)
        done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False)
        failed = {"way": way, "rows at a time": batch, "failed": done.stderr.strip().splitlines()[-1]}
        rows.append(failed if done.returncode else json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    shares = {(row["way"], row["rows at a time"]): row["share of the machine"] for row in rows if "failed" not in row}
    limits = [Limit("share of the machine in slots, 256 rows", shares.get(("slots", 256), 0.0), 0.5, "min")]
    return rows, limits


def make_model(folder: Path) -> None:
    """Save a Llama with 1.24 billion random weights and a byte tokenizer. Exits without a GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from partita.tokenizers.load import byte_tokenizer

    if not torch.cuda.is_available():
        sys.exit("not run: torch sees no GPU here")
    print(f"Device: {torch.cuda.get_device_name()}.", flush=True)
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    byte_tokenizer(max_length=8192).save_pretrained(folder / "model")


def load(folder: str) -> Any:
    """Return partita's pipeline for answers of a fixed length."""
    from partita.model import Model

    config = zero_shot(f"{folder}/model", "prompt response", tokens=NEW_TOKENS, model_parameters={"dtype": "bfloat16"})
    config["generation"]["min_new_tokens"] = NEW_TOKENS
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
        "prompt tokens": length,
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
    import torch

    if way in ("slots", "tuned"):
        answer, batch = in_slots(folder, batch)
    else:
        answer = by_the_library(folder, way, batch)
    prompts = np.random.default_rng(0).integers(5, 250, (max(256, batch), PROMPT_TOKENS)).tolist()
    answer(prompts[: max(2, batch // 8)])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    tokens = answer(prompts)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    least = least_seconds(len(prompts), batch)
    return {
        "way": way,
        "rows at a time": batch,
        "rows": len(prompts),
        "tokens/s": round(tokens / seconds),
        "seconds": round(seconds, 2),
        "share of the machine": round(least / seconds, 3),
        "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def in_slots(folder: str, batch: int) -> tuple[Callable[[list[list[int]]], int], int]:
    """Return a function that answers in slots, and their number; 0 means the number chosen by the tuner."""
    model = load(folder)
    pipeline = model._backend.pipeline()
    rows = batch or model._backend.tuner.generation(np.full(ROWS, PROMPT_TOKENS)).rows

    def answer(chosen: list[list[int]]) -> int:
        return sum(len(one.ids) for one in answer_in_slots(pipeline, chosen, rows)[0])

    return answer, rows


def by_the_library(folder: str, way: str, batch: int) -> Any:
    """Return a function that answers with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.bfloat16).to("cuda").eval()
    limit = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}

    def static(chosen: list[list[int]]) -> int:
        tokens = 0
        with torch.inference_mode():
            for start in range(0, len(chosen), batch):
                ids = torch.tensor(chosen[start : start + batch], device="cuda")
                found = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **limit)
                tokens += found[:, PROMPT_TOKENS:].numel()
        return tokens

    def continuous(chosen: list[list[int]]) -> int:
        options = GenerationConfig(eos_token_id=2, pad_token_id=0, **limit)
        found = model.generate_batch(chosen, generation_config=options, progress_bar=False)
        if len(found) != len(chosen):
            sys.exit(f"generate_batch gave {len(found)} answers to {len(chosen)} prompts")
        return sum(len(one.generated_tokens) for one in found.values())

    return static if way == "generate" else continuous


def least_seconds(rows: int, batch: int) -> float:
    """Return the minimum seconds: prompts at the machine's rate of matrix products, steps at its bandwidth."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / timed(lambda: left @ left)
    wide = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    bandwidth = 2 * wide.numel() / timed(lambda: wide.clone())
    read = 2 * PARAMETERS * rows * PROMPT_TOKENS / rate
    held = batch * (PROMPT_TOKENS + NEW_TOKENS / 2) * KEY_BYTES
    return float(read + rows / batch * NEW_TOKENS * (2 * PARAMETERS + held) / bandwidth)


def timed(work: Any) -> float:
    """Return the mean seconds of ten runs, after three warm-up runs."""
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / 10


if __name__ == "__main__":
    main(tuner, generate)
