"""LoRA over the fixed work: real tokens a CPU second, beside the Hugging Face Trainer as a careful user sets it up.

Needs the shared folder beside the checkout. Each contender runs in a process of its own with one thread, in turn, and
the medians are compared, of three runs for what is promised something, of one for what only shows where it begins. One
epoch over 512 rows of skewed lengths, loss on the response only, at most 512 tokens, r 8 on all linear layers, constant
2e-4, fp32, no evaluation, no saving in between. A batch holds 8 rows, or 1,024 tokens, padding included, or packed rows
in two lines of 512: about 64 steps and the same tokens for all. The quick run is one of
group_by_length and one of token_budget.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import SHARED, Limit, parse_arguments, report, run_script

CONTENDERS = {
    "Trainer, random batches": ("peer", "random"),
    "Trainer, group_by_length": ("peer", "group_by_length"),
    "partita, fixed": ("ours", "fixed"),
    "partita, bucket": ("ours", "bucket"),
    "partita, token_budget": ("ours", "token_budget"),
    "partita, pack": ("ours", "pack"),
}
PEER, BUCKET, BUDGET = "Trainer, group_by_length", "partita, bucket", "partita, token_budget"
ONCE = ("Trainer, random batches", "partita, fixed")
"""Slow, and nothing is promised of them."""
ROUNDS = 3
BATCHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"type": "fixed"}, {"batch_size": 8}),
    "bucket": ({"type": "bucket"}, {"batch_size": 8}),
    "token_budget": ({"type": "token_budget", "max_tokens": 1024}, {}),
    "pack": ({"type": "pack", "max_tokens": 512}, {"batch_size": 2}),
}
"""data.batching, and what the trainer says beside it."""


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    if not SHARED.is_dir():
        sys.exit(f"needs the shared folder at {SHARED}")
    chosen = [name for name in CONTENDERS if not arguments.quick or name in (PEER, BUDGET)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        run_script([SHARED / "peers" / "workload.py", folder])
        for number in range(1 if arguments.quick else ROUNDS):
            for name in chosen:
                if number and name in ONCE:
                    continue
                kind, mode = CONTENDERS[name]
                script = SHARED / "peers" / "train_hf.py" if kind == "peer" else Path(__file__)
                words = [folder, "tiny", mode] if kind == "peer" else ["--one", folder, mode]
                found[name].append(json.loads(run_script([script, *words]).splitlines()[-1]))
                print(name, found[name][-1], flush=True)
    table = [row(name, results) for name, results in found.items()]
    limits = promises({name: results for name, results in found.items() if name not in ONCE})
    report("train", table, limits, arguments=arguments, about=" ".join((__doc__ or "").split("\n\n", 1)[0].split()))


def promises(found: dict[str, list[dict[str, Any]]]) -> list[Limit]:
    """Ratios are medians over the rounds, of runs that stood side by side."""
    rates = {name: [result["tokens_per_cpu_s"] for result in results] for name, results in found.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(rates[PEER], rates[name], strict=True))
        for name in found
        if name != PEER
    }
    # The fastest as the table tells it: whatever order two contenders of equal speed have in the medians of ratios.
    best = max(ratios, key=lambda name: statistics.median(result["tokens_per_cpu_s"] for result in found[name]))
    loss = {name: statistics.median(result["loss"] for result in results) for name, results in found.items()}
    padding = statistics.median(result["padding"] for result in found[best])
    seen = {result["tokens"] for results in found.values() for result in results}
    least = ({BUCKET: 1.1} if BUCKET in ratios else {}) | {best: 1.25}
    return [
        *(
            Limit(f"tokens a CPU second, {name} over {PEER}", round(ratios[name], 3), to, "min")
            for name, to in least.items()
        ),
        Limit("padding of the fastest", padding, 0.025, "max"),
        Limit(
            f"mean training loss above {PEER}", round(max(loss[name] - loss[PEER] for name in ratios), 4), 0.05, "max"
        ),
        Limit("tokens that one contender saw and another did not", max(seen) - min(seen), 0, "max"),
    ]


def row(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    return {
        "contender": name,
        "tokens/CPU s": median("tokens_per_cpu_s"),
        "CPU s": median("cpu"),
        "padding": median("padding"),
        "loss": median("loss"),
        "steps": int(median("steps")),
        "peak MB": int(median("rss_mb")),
    }


def one(folder: str, mode: str) -> None:
    """Our side, in its own process: prints a line of JSON as the peer does."""
    import resource

    import torch

    from partita.model import Model
    from partita_trainers.finetune import FinetuneRun

    torch.set_num_threads(1)
    batching, written = BATCHING[mode]
    spent: dict[str, float] = {}
    train_loop = FinetuneRun.train_loop

    def timed(training: FinetuneRun) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        train_loop(training)
        spent.update(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)

    FinetuneRun.train_loop = timed  # type: ignore[method-assign]
    config = {
        "base_model": f"{folder}/tiny",
        "seed": 0,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "adapter": {"type": "lora", "r": 8, "alpha": 16},
        "preprocessing": {"global_max_sequence_length": 512},
        "data": {"split": {"type": "random", "probabilities": [1, 0, 0]}, "batching": batching},
        "trainer": {
            "type": "finetune",
            "epochs": 1,
            "gradient_accumulation_steps": 1,
            "learning_rate": 2e-4,
            "learning_rate_scheduler": {"decay": "constant", "warmup_steps": 0},
            "checkpoints_per_epoch": 0,
            "skip_all_evaluation": True,
            **written,
        },
    }
    with tempfile.TemporaryDirectory() as place:
        result = Model(config, quiet=True).train(f"{folder}/rows.jsonl", run=f"{place}/run")
        log = [json.loads(line) for line in (result.run / "log.jsonl").read_text().splitlines()]
    tokens = sum(line["tokens"] for line in log)
    padded = sum(line["tokens"] / (1 - line["padding"]) for line in log)
    print(
        json.dumps(
            {
                "steps": result.steps,
                "cpu": round(spent["cpu"], 2),
                "wall": round(spent["wall"], 2),
                "tokens": tokens,
                "tokens_per_cpu_s": round(tokens / spent["cpu"], 1),
                "padding": round(1 - tokens / padded, 3),
                "loss": round(statistics.mean(line["loss"] for line in log), 4),
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], sys.argv[3])
    else:
        main()
