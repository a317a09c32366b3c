"""Training with a fixed amount of work: real tokens per CPU second, compared with tuned trainers of other libraries.

One epoch over 512 rows of skewed lengths, loss on the response only, at most 512 tokens, constant learning rate, fp32,
no evaluation, no saving in between. A batch has 8 rows, or 1,024 tokens including padding, or packed rows in two lines
of 512: about 64 steps and the same tokens for all.
"""

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fixtures import TRL, train_timed
from harness import SHARED, Limit, Result, Row, call, main, one_thread, peer_environment, run_script

SCRIPTS = Path(__file__).parent
TRAINER, RANDOM, SFT = "Trainer, group_by_length", "Trainer, random batches", "SFTTrainer, group_by_length"
TUNE, TUNE_PACK = "torchtune, random batches", "torchtune, packed"
ENVIRONMENTS = {
    "trl": ([f"trl=={TRL}"], ["transformers", "peft", "accelerate"]),
    "torchtune": (["torchtune==0.6.1", "torchao==0.10.0"], ["transformers", "peft", "accelerate"]),
}
"""Packages of the environments of peers, and those in our versions. Later versions of torchao lack a part of it."""
FIXED, BUCKET, BUDGET, PACK = "partita, fixed", "partita, bucket", "partita, token_budget", "partita, pack"
ROUNDS = 3
RATES = {False: 2e-4, True: 2e-5}
"""Learning rate with LoRA, and of full fine-tuning."""
BATCHING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    FIXED: ({"type": "fixed"}, {"batch_size": 8}),
    BUCKET: ({"type": "bucket"}, {"batch_size": 8}),
    BUDGET: ({"type": "token_budget", "max_tokens": 1024}, {}),
    PACK: ({"type": "pack", "max_tokens": 512}, {"batch_size": 2}),
}
"""`data.batching`, and the corresponding keys of the trainer."""

Contender = Callable[[], Row]


def lora(folder: Path, quick: bool) -> Result:
    """LoRA with r 8 on all linear layers, compared with transformers' Trainer, TRL's SFTTrainer and torchtune.

    Needs the shared folder next to the repository. Each contender runs in a separate process with one thread, in turn,
    and the medians are compared, of three runs for contenders with a limit and of one for the others. SFTTrainer and
    torchtune run in environments with the same torch and transformers, which the script creates. torchtune has no
    batches of similar lengths. The quick run is one of group_by_length and one of token_budget.

    A profile of token_budget on an EPYC of family 25, model 17: products with the frozen weights take 49 % of the time
    of the loop, the output layer 8 %, products with the adapter 8 %, attention 15 % and everything else 20 %. A library
    that multiplies 1.7 times as fast would therefore make the loop 1.3 times as fast. MKL reaches 94 to 97 GFLOP/s
    there and the processor 110, so oneDNN takes part in the output layer only.
    """
    run_script([SHARED / "peers" / "workload.py", folder])

    def trainer(mode: str) -> Row:
        said = run_script([SHARED / "peers" / "train_hf.py", folder, "tiny", mode])
        return dict(json.loads(said.splitlines()[-1]))

    contenders: dict[str, Contender] = {TRAINER: lambda: trainer("group_by_length"), BUDGET: own(folder, BUDGET)}
    if not quick:
        contenders |= {
            SFT: trainer_of(folder, "trl", "SFTTrainer", full=False),
            BUCKET: own(folder, BUCKET),
            PACK: own(folder, PACK),
            RANDOM: lambda: trainer("random"),
            FIXED: own(folder, FIXED),
            TUNE: torchtune(folder, full=False, packed=False),
            TUNE_PACK: torchtune(folder, full=False, packed=True),
        }
    found = in_turn(contenders, rounds=1 if quick else ROUNDS, once=(RANDOM, FIXED, TUNE, TUNE_PACK))
    least = {BUDGET: 1.8} | ({} if quick else {BUCKET: 1.1})
    compared = [name for name in (TRAINER, BUDGET, BUCKET, PACK) if name in found]
    return table(found), limits({name: found[name] for name in compared}, least)


def full(folder: Path, quick: bool) -> Result:
    """Training of all weights, compared with transformers' Trainer, TRL's SFTTrainer and torchtune.

    Needs the shared folder next to the repository. As with LoRA; torchtune runs once, the others three times. Products
    take 62 % of the time of the loop of token_budget, attention 12 % and everything else 26 %.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    contenders = {
        TRAINER: trainer_of(folder, None, "Trainer", full=True),
        BUDGET: own(folder, BUDGET, full=True),
        SFT: trainer_of(folder, "trl", "SFTTrainer", full=True),
        TUNE_PACK: torchtune(folder, full=True, packed=True),
    }
    found = in_turn(contenders, rounds=1 if quick else ROUNDS, once=(TUNE_PACK,))
    return table(found), limits({name: found[name] for name in (TRAINER, BUDGET)}, {BUDGET: 1.6})


def own(folder: Path, name: str, *, full: bool = False) -> Contender:
    return lambda: call(train_partita, folder, name, full)


def trainer_of(folder: Path, library: str | None, trainer: str, *, full: bool) -> Contender:
    """Return the training with a trainer of transformers, in our environment, or of TRL, in an environment with it."""
    return lambda: run_peer(folder, library, "train_peer.py", full=full, trainer=trainer)


def torchtune(folder: Path, *, full: bool, packed: bool) -> Contender:
    """Return the training with torchtune."""
    return lambda: run_peer(folder, "torchtune", "train_torchtune.py", full=full, packed=packed)


def run_peer(folder: Path, library: str | None, script: str, *, full: bool, **more: Any) -> Row:
    """Run a script of a peer; the environment of its library is created at first. Return an error if it cannot be."""
    programs = Path(sys.executable).parent if library is None else folder / library / "environment" / "bin"
    if library is not None and not programs.exists():
        programs.parents[1].mkdir(exist_ok=True)
        packages, same = ENVIRONMENTS[library]
        _, reason = peer_environment(programs.parents[1], *packages, same=same)
        if reason:
            return {"error": reason}
    job = folder / "job.json"
    content = {"folder": str(folder), "full": full, "learning_rate": RATES[full]} | more
    job.write_text(json.dumps(content), encoding="utf8")
    words = [programs / "python", SCRIPTS / script, job]
    done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode and library is None:
        sys.exit(done.stderr)
    if done.returncode:  # a peer may fail in any way
        return {"error": done.stderr.strip().splitlines()[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def in_turn(contenders: Mapping[str, Contender], *, rounds: int, once: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Run the contenders in turn; return their results. Those in `once` run in the first round only."""
    found: dict[str, list[Row]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            if number and (name in once or "error" in found[name][-1]):
                continue
            found[name].append(contender())
            print(name, found[name][-1], flush=True)
    return found


def limits(found: Mapping[str, list[Row]], least: Mapping[str, float]) -> list[Limit]:
    """Return the limits. Ratios are medians over the rounds, of runs of the same round."""
    rates = {name: [result["tokens_per_cpu_s"] for result in results] for name, results in found.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(rates[TRAINER], rates[name], strict=True))
        for name in found
        if name != TRAINER
    }
    loss = {name: statistics.median(result["loss"] for result in results) for name, results in found.items()}
    padding = statistics.median(result["padding"] for result in found[BUDGET])
    seen = {result["tokens"] for results in found.values() for result in results}
    return [
        *(
            Limit(f"tokens a CPU second, {name} over {TRAINER}", round(ratios[name], 3), to, "min")
            for name, to in least.items()
        ),
        Limit(f"padding of {BUDGET}", padding, 0.025, "max"),
        Limit(
            f"mean training loss above {TRAINER}",
            round(max(loss[name] - loss[TRAINER] for name in ratios), 4),
            0.05,
            "max",
        ),
        Limit("tokens that one contender saw and another did not", max(seen) - min(seen), 0, "max"),
    ]


def table(found: Mapping[str, list[Row]]) -> list[Row]:
    """Return the medians of each contender."""
    return [{"contender": name} | median_row(results) for name, results in found.items()]


def median_row(results: list[Row]) -> Row:
    if "error" in results[-1]:
        return {"error": results[-1]["error"]}

    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    return {
        "tokens/CPU s": median("tokens_per_cpu_s"),
        "CPU s": median("cpu"),
        "padding": median("padding"),
        "loss": median("loss"),
        "steps": int(median("steps")),
        "peak MB": int(median("rss_mb")),
    }


def train_partita(folder: str, name: str, full: bool) -> Row:
    """Train in this process; return the same measurements as the scripts of the peers."""
    batching, trainer = BATCHING[name]
    config = {
        "base_model": f"{folder}/tiny",
        "seed": 0,
        "input_features": [{"name": "prompt", "type": "text"}],
        "output_features": [{"name": "response", "type": "text"}],
        "adapter": None if full else {"type": "lora", "r": 8, "alpha": 16},
        "preprocessing": {"global_max_sequence_length": 512},
        "data": {"split": {"type": "random", "probabilities": [1, 0, 0]}, "batching": batching},
        "trainer": {
            "type": "finetune",
            "epochs": 1,
            "gradient_accumulation_steps": 1,
            "learning_rate": RATES[full],
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
    main(lora, full)
