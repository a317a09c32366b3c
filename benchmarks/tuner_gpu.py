"""The tuner on a GPU beside brute force: a new model of 1.2 billion parameters in bf16, three lengths of prompts.

Needs a GPU, and says so without one. For prompts of 128, 512 and 2,048 tokens and 128 new ones: the largest batch that
truly generates all of its tokens, by trying, beside what the tuner says fits; how long the probes took; and whether a
job goes on after a batch that did not fit. All of it with expandable segments and without.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Limit, parse_arguments, report

LENGTHS = (128, 512, 2048)
NEW_TOKENS = 128
ROWS = 20_000


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    with model_folder() as folder:
        for segments in ("True",) if arguments.quick else ("True", "False"):
            for length in LENGTHS[:1] if arguments.quick else LENGTHS:
                rows.append(one(folder, length, segments=segments))
                print(rows[-1], flush=True)
    limits = [
        Limit("share of what truly fits, least", min(row["share"] for row in rows), 0.94, "min"),
        Limit("share of what truly fits, most", max(row["share"] for row in rows), 1.0, "max"),
        Limit("batches that did not fit, least", min(row["batches that did not fit"] for row in rows), 1, "min"),
        Limit("rows lost after a batch that did not fit", sum(row["lost"] for row in rows), 0, "max"),
    ]
    report("tuner_gpu", rows, limits, arguments=arguments, about=f"{' '.join((__doc__ or '').split())} {device()}")


@contextmanager
def model_folder() -> Iterator[str]:
    """A folder with the model in `model`, while it is used. Ends the program where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("not run: torch sees no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"))
        yield folder


def device() -> str:
    """A sentence with the name of the GPU."""
    import torch

    return f"Device: {torch.cuda.get_device_name()}."


def make_model(folder: Path) -> None:
    """A Llama of 1.24 billion parameters with random weights, and a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from partita.tokenizers.load import byte_tokenizer

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
    model.save_pretrained(folder)
    byte_tokenizer(max_length=8192).save_pretrained(folder)


def load(folder: str) -> Any:
    """The model as partita holds it, for answers of a fixed length."""
    from partita.model import Model

    config = {
        "base_model": f"{folder}/model",
        "model_parameters": {"dtype": "bfloat16"},
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "generation": {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS},
        "trainer": {"type": "none"},
    }
    return Model(config, quiet=True)


def one(folder: str, length: int, *, segments: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": f"expandable_segments:{segments}"}
    words = [sys.executable, __file__, "--one", folder, str(length)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"expandable segments": segments == "True", **found}


def measure(folder: str, length: int) -> dict[str, Any]:
    """The tuner's answer and the truth, in one process: a GPU recovers from what does not fit."""
    import numpy as np
    import torch

    from partita.generation.generator import generate_requests
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings
    from partita.lm.base import GenerationRequest
    from partita_schema.errors import OutOfMemory

    model = load(folder)
    pipeline = model._backend.parts()
    os.environ["PARTITA_CACHE"] = f"{folder}/cache"
    started = time.perf_counter()
    found = model._backend.tuner.generation(np.full(ROWS, length))
    seconds = time.perf_counter() - started
    fits = found.max_fitting or 0

    def runs(rows: int) -> bool:
        ids = np.random.default_rng(rows).integers(5, 250, (rows, length)).tolist()
        requests = [GenerationRequest(prompt, NEW_TOKENS) for prompt in ids]
        held = BatchBudget(rows)
        try:
            generate_requests(pipeline.lm, requests, GenerationSettings(pipeline.generation, held, 0))
        except OutOfMemory:
            return False
        finally:
            torch.cuda.empty_cache()
        return not held.out_of_memory

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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
