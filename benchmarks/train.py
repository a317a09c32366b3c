"""LoRA training with a fixed amount of work: real tokens per CPU second, compared with a tuned Hugging Face Trainer.

Needs the shared folder next to the repository. Each contender runs in a separate process with one thread, in turn, and
the medians are compared, of three runs for contenders with a limit and of one for the others. One epoch over 512 rows
of skewed lengths, loss on the response only, at most 512 tokens, r 8 on all linear layers, constant 2e-4, fp32, no
evaluation, no saving in between. A batch has 8 rows, or 1,024 tokens including padding, or packed rows in two lines of
512: about 64 steps and the same tokens for all. The quick run is one of group_by_length and one of token_budget.
"""

import json
import resource
import statistics
from pathlib import Path
from typing import Any

from fixtures import train_timed
from harness import SHARED, Limit, Result, Row, call, main, run_script

CONTENDERS = {
    "Trainer, random batches": "random",
    "Trainer, group_by_length": "group_by_length",
    "partita, fixed": "fixed",
    "partita, bucket": "bucket",
    "partita, token_budget": "token_budget",
    "partita, pack": "pack",
}
PEER, BUCKET, BUDGET = "Trainer, group_by_length", "partita, bucket", "partita, token_budget"
ONCE = ("Trainer, random batches", "partita, fixed")
"""Slow contenders without a limit."""
ROUNDS = 3
BATCHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"type": "fixed"}, {"batch_size": 8}),
    "bucket": ({"type": "bucket"}, {"batch_size": 8}),
    "token_budget": ({"type": "token_budget", "max_tokens": 1024}, {}),
    "pack": ({"type": "pack", "max_tokens": 512}, {"batch_size": 2}),
}
"""`data.batching`, and the corresponding keys of the trainer."""


def train(folder: Path, quick: bool) -> Result:
    chosen = [name for name in CONTENDERS if not quick or name in (PEER, BUDGET)]
    found: dict[str, list[Row]] = {name: [] for name in chosen}
    run_script([SHARED / "peers" / "workload.py", folder])
    for number in range(1 if quick else ROUNDS):
        for name in chosen:
            if number and name in ONCE:
                continue
            mode = CONTENDERS[name]
            if name.startswith("Trainer"):
                said = run_script([SHARED / "peers" / "train_hf.py", folder, "tiny", mode])
                found[name].append(json.loads(said.splitlines()[-1]))
            else:
                found[name].append(call(train_partita, folder, mode))
            print(name, found[name][-1], flush=True)
    table = [row(name, results) for name, results in found.items()]
    return table, promises({name: results for name, results in found.items() if name not in ONCE})


def promises(found: dict[str, list[dict[str, Any]]]) -> list[Limit]:
    """Return the limits. Ratios are medians over the rounds, of consecutive runs."""
    rates = {name: [result["tokens_per_cpu_s"] for result in results] for name, results in found.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(rates[PEER], rates[name], strict=True))
        for name in found
        if name != PEER
    }
    # The fastest in the table, even if the medians of ratios have another order.
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


def train_partita(folder: str, mode: str) -> Row:
    """Train in this process; return the same measurements as the script of the peer."""
    batching, trainer = BATCHING[mode]
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
            **trainer,
        },
    }
    log, spent = train_timed(config, f"{folder}/rows.jsonl")
    tokens = sum(line["tokens"] for line in log)
    padded = sum(line["tokens"] / (1 - line["padding"]) for line in log)
    return {
        "steps": len(log),
        "cpu": round(spent.cpu, 2),
        "wall": round(spent.wall, 2),
        "tokens": tokens,
        "tokens_per_cpu_s": round(tokens / spent.cpu, 1),
        "padding": round(1 - tokens / padded, 3),
        "loss": round(statistics.mean(line["loss"] for line in log), 4),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main(train)
