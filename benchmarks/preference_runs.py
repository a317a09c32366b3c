"""Training on preferences: the same for any architecture, micro-batch and number of processes, and after kills."""

import json
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from architectures import saved_and_loaded
from fixtures import WHOLE, log_of, make_model, words, write_rows
from harness import Limit, Result, Row, main
from kills import new_chance
from processes import count_lines, fork, import_all, kill_when, must_run_ranks, run_fork
from tiny_models import LEFT_OUT, kinds

SHORT_WINDOW = 4
WITHIN = 1e-5
QUICK = ("llama", "gemma2", "gemma3_text", "mamba", "bloom")
STEPS, PAIRS_OF_STEP = 8, 8
LOSSES: dict[str, Row] = {
    "dpo": {"type": "preference", "loss": {"type": "dpo", "rpo_alpha": 0.1}},
    "orpo": {"type": "preference", "loss": {"type": "orpo"}},
    "simpo": {"type": "preference", "loss": {"type": "simpo"}},
    "kto": {"type": "kto", "undesirable_weight": 1.5},
}
SPLITS = {"8 x 1": (8, 1), "2 x 4": (2, 1), "1 x 8": (1, 1), "2 ranks": (4, 2), "4 ranks": (2, 4)}
"""Rows of a micro-batch and processes, by name; all have 8 rows a step."""
KILLS = 10


# Architectures


def architectures(folder: Path, quick: bool) -> Result:
    """Log-probabilities of two answers that share a prompt in one row, compared with those of separate rows.

    Every causal architecture of transformers is built as a tiny random model. Rows are packed and padded, prompts have
    3 and 5 tokens and answers 1 to 6. Architectures with sliding windows are also tested with windows of 4 tokens.
    `error` is the largest difference of the log-probability of a token. The table has how many models compute a prompt
    once for both answers, and single rows for each gemma and for models that differ by more than 1e-5.
    """
    table, within = list[Row](), 0
    ways: dict[str, list[float]] = {"once": [], "separate rows": []}
    for kind in QUICK if quick else kinds():
        if kind in LEFT_OUT:
            continue
        found = [result for window in (None, SHORT_WINDOW) if (result := compared(kind, folder / "model", window))]
        if not found:
            continue
        print(kind, found, flush=True)
        error, once = max(result["error"] for result in found), found[0]["reason"] is None
        ways["once" if once else "separate rows"].append(error)
        within += once and error <= WITHIN
        if "gemma" in kind or error > WITHIN:
            table += [{"model": kind, "prompts": result["reason"] or "once", **result} for result in found]
    summary = [{"model": f"{len(errors)} models", "prompts": way, "error": max(errors)} for way, errors in ways.items()]
    for row in table:
        del row["reason"]
    return [*summary, *table], [Limit("models with a difference of at most 1e-5", within, 3 if quick else 10, "min")]


def compared(kind: str, folder: Path, window: int | None) -> Row | None:
    """Return the largest difference for a model; None if it cannot be built or has no windows."""
    import torch

    from partita.lm.branches.masks import probe_rows, separate_rows
    from partita_schema.errors import PartitaError

    shutil.rmtree(folder, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lm = saved_and_loaded(kind, folder, window=window)
    except (PartitaError, ValueError, TypeError, AttributeError, RuntimeError, KeyError):
        return None
    config = lm.base.config.get_text_config()
    if window is not None and getattr(config, "sliding_window", None) != window:
        return None
    batch = probe_rows(lm.token_ids)
    with torch.no_grad(), lm.evaluating():
        try:
            one, other = (lm.token_log_probs(lm.module, rows) for rows in (batch, separate_rows(batch)))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return None
    return {"window": window, "reason": lm.branch_support.reason, "error": float((one - other).abs().max())}


# Micro-batches and processes


def splits(folder: Path, quick: bool) -> Result:
    """The same eight steps of eight rows in micro-batches of 8, 2 and 1 rows, and on 2 and 4 processes.

    All weights of a model of 0.3 M parameters are trained with SGD, which does not amplify rounding errors as Adam
    does. Each run is compared with one process and micro-batches of 8 rows: the loss and the metrics of each step and
    of the evaluations, and the change of the weights, which is the sum of the gradients. `4, then 1` is a run on four
    processes that continues on one after four steps.
    """
    write_data(folder)
    import_all()
    table = [row for name in (("dpo", "kto") if quick else LOSSES) for row in compare_splits(folder, name)]
    return table, [
        Limit("relative difference of a loss or metric", max(row["metrics"] for row in table), 1e-6, "max"),
        Limit("relative difference of the gradients", max(row["gradients"] for row in table), 1e-6, "max"),
    ]


def compare_splits(folder: Path, name: str) -> Iterator[Row]:
    """Yield a row of the table for each way to split the steps."""
    runs = {split: folder / f"{name}-{split.replace(' ', '-')}" for split in (*SPLITS, "4, then 1")}
    for split, (rows, ranks) in SPLITS.items():
        train_ranks(ranks, config_of(folder, name, rows), runs[split], STEPS)
    train_ranks(4, config_of(folder, name, 2), runs["4, then 1"], STEPS // 2)
    train_ranks(1, config_of(folder, name, 2), runs["4, then 1"], STEPS)
    first = next(iter(SPLITS))
    for split in list(runs)[1:]:
        row = {
            "loss": name,
            "split": split,
            "metrics": max(differences(numbers_of(runs[first]), numbers_of(runs[split]))),
            "gradients": gradient_difference(folder / "model", runs[first], runs[split]),
        }
        print(row, flush=True)
        yield row


def config_of(folder: Path, name: str, batch_size: int, **trainer: Any) -> Row:
    """Return a config that trains and evaluates the rows of the folder."""
    kto = name == "kto"
    output = (
        {"name": "completion", "type": "text", "label": "good"} if kto else {"name": "answer", "type": "preference"}
    )
    rows = "labelled" if kto else "pairs"
    return {
        "base_model": str(folder / "model"),
        "seed": 7,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [output],
        "generation": {"max_new_tokens": 4},
        "data": {
            "source": str(folder / f"{rows}.jsonl"),
            "split": WHOLE,
            "batching": {"type": "fixed"},
            "validation": str(folder / f"{rows}-2.jsonl"),
        },
        "trainer": {
            **LOSSES[name],
            "optimizer": {"type": "sgd"},
            "learning_rate": 0.5,
            "learning_rate_scheduler": {"decay": "none", "warmup_steps": 0},
            "gradient_clipping": {},
            "batch_size": batch_size,
            "effective_batch_size": PAIRS_OF_STEP,
            "eval_batch_size": 8,
            "steps_per_evaluation": STEPS // 2,
            "steps_per_checkpoint": 1,
            **trainer,
        },
    }


def train_ranks(ranks: int, config: Row, run: Path, steps: int) -> None:
    """Train up to a step on a number of processes."""
    must_run_ranks(ranks, lambda _: train(config, run, steps))


def train(config: Row, run: Path, steps: int) -> None:
    """Train up to a step on this process."""
    from partita.model import Model

    Model(config | {"trainer": config["trainer"] | {"max_steps": steps}}, quiet=True).train(run=run)


def numbers_of(run: Path) -> dict[str, float]:
    """Return the losses and metrics of all steps, and those of the evaluations."""
    kept = ("loss", "rewards/", "logps/", "kl", "chosen_falls")
    numbers = {
        f"step {record['step']} {name}": value
        for record in log_of(run)
        for name, value in record.items()
        if name.startswith(kept)
    }
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf8"))
    found = manifest["metrics"]["validation"]
    return numbers | {f"validation {name}": value for name, value in found.items() if isinstance(value, float)}


def differences(one: dict[str, float], other: dict[str, float]) -> list[float]:
    """Return the relative difference of each number; of numbers below 1, the absolute one."""
    assert one.keys() == other.keys()
    return [abs(one[name] - other[name]) / max(1.0, abs(one[name])) for name in one]


def gradient_difference(start: Path, one: Path, other: Path) -> float:
    """Return the norm of the difference of the summed gradients of two runs, over the norm."""
    from safetensors.torch import load_file

    before, left, right = (load_file(path / "model.safetensors") for path in (start, one / "model", other / "model"))
    difference = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    moved = sum(float((left[name] - before[name]).double().square().sum()) for name in left)
    return float((difference / moved) ** 0.5)


def write_data(folder: Path) -> None:
    """Write a model, and pairs and labelled answers for training and evaluation."""
    make_model(folder / "model", context=512)
    rng = random.Random(0)
    for end, count in (("", STEPS * PAIRS_OF_STEP), ("-2", 24)):
        pairs = [
            {
                "prompt": words(rng, rng.randint(5, 30)),
                "chosen": words(rng, rng.randint(2, 12)),
                "rejected": words(rng, rng.randint(2, 12)),
            }
            for _ in range(count)
        ]
        write_rows(folder / f"pairs{end}.jsonl", pairs)
        write_rows(
            folder / f"labelled{end}.jsonl",
            [{"prompt": row["prompt"], "completion": row["chosen"], "good": rng.random() < 0.6} for row in pairs],
        )


# Kills


def kills(folder: Path, quick: bool) -> Result:
    """Ten SIGKILLs at random moments of a run on pairs, and of one on labelled answers.

    LoRA with dropout, references computed before the first step or in steps, a checkpoint at each step, 32 steps over
    four epochs. The weights at the end are compared bit for bit with those of an uninterrupted run, the losses and
    metrics of the steps exactly.
    """
    write_data(folder)
    import_all()
    seed, rng = new_chance()
    cases: dict[str, tuple[str, Row]] = {
        "dpo, references before": ("dpo", {"references": "before"}),
        "dpo, references in steps": ("dpo", {"references": "in_step"}),
        "kto, references before": ("kto", {"references": "before"}),
    }
    table = [
        kill_run(folder, case, name, changes, kills=2 if quick else KILLS, rng=rng)
        for case, (name, changes) in cases.items()
    ]
    return [*table, {"run": f"random moments drawn with seed {seed}"}], [
        Limit("kills of each run", min(row["kills"] for row in table), 2 if quick else KILLS, "min"),
        Limit("tensors that differ", sum(row["tensors that differ"] for row in table), 0, "max"),
        Limit("steps that differ", sum(row["steps that differ"] for row in table), 0, "max"),
    ]


def kill_run(folder: Path, case: str, name: str, changes: Row, *, kills: int, rng: random.Random) -> Row:
    """Train once without and once with kills; return the row of the table."""
    from safetensors.torch import load_file

    config = config_of(folder, name, 4, epochs=4, optimizer={"type": "adamw"}, learning_rate=1e-3, **changes)
    config |= {"adapter": {"type": "lora", "dropout": 0.1}}
    steps, started = 4 * STEPS, time.perf_counter()
    straight, killed = (folder / f"{case} {way}".replace(" ", "-") for way in ("straight", "killed"))
    run_fork(partial(train, config, straight, steps))
    found = Counter[str]()
    for step in sorted(rng.sample(range(steps - 3), kills)):
        found["kills"] += kill_after(partial(train, config, killed, steps), killed, step, rng.uniform(0, 0.1))
    run_fork(partial(train, config, killed, steps))
    one, other = (load_file(run / "model" / "adapter_model.safetensors") for run in (straight, killed))
    logs = [{record["step"]: record | {"seconds": None} for record in log_of(run)} for run in (straight, killed)]
    row = {
        "run": case,
        "steps": steps,
        "kills": found["kills"],
        "tensors that differ": sum(not one[name].equal(other[name]) for name in one),
        "steps that differ": sum(logs[1].get(step) != record for step, record in logs[0].items()),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(row, flush=True)
    return row


def kill_after(work: Any, run: Path, step: int, moment: float) -> bool:
    """Kill an attempt some seconds after a step; with step 0, after the run directory exists."""

    def due() -> bool:
        return count_lines(run, "log.jsonl") >= step if step else run.exists()

    return kill_when(fork(work), due, delay=lambda: moment)


if __name__ == "__main__":
    main(architectures, splits, kills)
