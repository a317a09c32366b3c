"""Answers on a GPU beside the library's own ways: a new model of 1.2 billion parameters in bf16, 512 + 128 tokens.

Needs a GPU, and says so without one. Batches of 64, 256 and 1,024 rows, by `generate` of transformers over a batch, by
its continuous batching, and in slots; then the size that the tuner chooses. Tokens a second, and their share of what
the machine could do: prompts at its measured rate of matrix products, decode steps at its measured bandwidth, weights
and keys read once a step.
"""

import json
import subprocess
import sys
import time
from typing import Any

from harness import Limit, parse_arguments, report
from tuner_gpu import NEW_TOKENS, device, load, model_folder

PROMPT_TOKENS = 512
BATCHES = (64, 256, 1024)
WAYS = ("generate", "generate_batch", "slots")
PARAMETERS, KEY_BYTES = 1.24e9, 2 * 16 * 8 * 64 * 2
"""Of the model; bytes of keys and values of a token."""


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    with model_folder() as folder:
        for batch in BATCHES[:1] if arguments.quick else BATCHES:
            for way in WAYS:
                rows.append(one(folder, way, batch))
                print(rows[-1], flush=True)
        rows.append(one(folder, "tuned", 0))
    shares = {(row["way"], row["rows at a time"]): row["share of the machine"] for row in rows if "failed" not in row}
    limits = [Limit("share of the machine in slots, 256 rows", shares.get(("slots", 256), 0.0), 0.5, "min")]
    report("generate_gpu", rows, limits, arguments=arguments, about=f"{' '.join((__doc__ or '').split())} {device()}")


def one(folder: str, way: str, batch: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", folder, way, str(batch)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"way": way, "rows at a time": batch, "failed": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(folder: str, way: str, batch: int) -> dict[str, Any]:
    """As many rows as are answered at a time, at least 256, once warm."""
    import numpy as np
    import torch

    if way in ("slots", "tuned"):
        answer, batch = in_slots(folder, batch=batch)
    else:
        answer = by_the_library(folder, way=way, batch=batch)
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


def in_slots(folder: str, *, batch: int) -> tuple[Any, int]:
    """Answers by the slot engine; of `batch` 0, by as many slots as the tuner chooses."""
    import numpy as np

    from partita.generation.generator import generate_requests
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings
    from partita.lm.base import GenerationRequest

    model = load(folder)
    pipeline = model._backend.parts()
    batch = batch or model._backend.tuner.generation(np.full(20_000, PROMPT_TOKENS)).rows

    def answer(chosen: list[list[int]]) -> int:
        requests = [GenerationRequest(ids, NEW_TOKENS) for ids in chosen]
        held = BatchBudget(batch)
        found = generate_requests(pipeline.lm, requests, GenerationSettings(pipeline.generation, held, 0))
        return sum(len(one.ids) for one in found)

    return answer, batch


def by_the_library(folder: str, *, way: str, batch: int) -> Any:
    """Answers by transformers."""
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
    """What the machine needs at least: prompts at its rate of products, steps at its bandwidth."""
    import torch

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / timed(lambda: left @ left)
    wide = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    bandwidth = 2 * wide.numel() / timed(lambda: wide.clone())
    read = 2 * PARAMETERS * rows * PROMPT_TOKENS / rate
    held = batch * (PROMPT_TOKENS + NEW_TOKENS / 2) * KEY_BYTES
    return float(read + rows / batch * NEW_TOKENS * (2 * PARAMETERS + held) / bandwidth)


def timed(work: Any) -> float:
    """Seconds of the work, the mean of ten after three."""
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
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main()
