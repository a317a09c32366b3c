"""Training all weights of a model on processes that each have it whole, and on processes that share it (FSDP2).

A Llama of 22 M parameters in float32 with AdamW: four numbers for each weight, itself, its gradient and two averages.
Memory is that of a process above what it held before it trained: its peak over the steps, and its peak in
all, with loading the model, a checkpoint and the result, for the first process and the others; what is freed goes back
to the system at once. Every process has one thread, and they meet over gloo on one machine, where an exchange is copied
by the same cores that compute: with networks between devices the time of a step is another one.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked import import_all, run_ranks
from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, settings, snli_rows, write_rows

Row = dict[str, Any]
CASES = (("whole", 1), ("whole", 2), ("shared", 2), ("shared", 4))
MODEL = {
    "type": "scratch",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "context_length": 128,
    "tokenizer": "bpe",
    "vocab_size": 2000,
}
MEASURED_FROM = 3
"""Step from which memory counts: optimizers have their state."""


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    steps = 6 if arguments.quick else 12
    import_all()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_rows(folder / "rows.jsonl", snli_rows(600))
        table = [case(folder, rows, kind, ranks, steps=steps) for kind, ranks in CASES]
    found = {(row["weights"], row["processes"]): row for row in table}
    whole, shared = found["whole", 2], found["shared", 2]
    limits = [
        Limit("steps that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("largest difference of a loss, relative", max(row["loss differs by"] for row in table), 1e-3, "max"),
        Limit("memory in steps, 2 sharing over 2 whole", shared["MB in steps"] / whole["MB in steps"], 0.65, "max"),
        Limit(
            "memory in steps, 4 sharing over 2 whole",
            found["shared", 4]["MB in steps"] / whole["MB in steps"],
            0.5,
            "max",
        ),
        Limit("seconds of a step, 2 sharing over 2 whole", shared["s a step"] / whole["s a step"], 1.5, "max"),
    ]
    report("distributed_sharding", table, limits, arguments=arguments, about=about(__doc__))


def case(folder: Path, rows: Path, kind: str, ranks: int, *, steps: int) -> Row:
    """A job of so many processes; what its first process and the others took."""
    run = folder / f"{kind}-{ranks}"
    config = settings(Path(), {"source": str(rows), "split": WHOLE}, max_steps=steps)
    config |= {"base_model": MODEL, "backend": {"type": "torchrun", "sharding": SHARDING[kind]}}
    del config["trainer"]["gradient_accumulation_steps"]
    config["trainer"] |= {"batch_size": 4, "effective_batch_size": 16, "learning_rate_scheduler": {"decay": "none"}}

    def work(rank: int) -> None:
        found = measured(config, run)
        (folder / f"{kind}-{ranks}-{rank}.json").write_text(json.dumps(found), encoding="utf8")

    if any(run_ranks(ranks, work, folder=run).status):
        sys.exit(f"{kind} on {ranks}: a rank failed")
    told = [json.loads((folder / f"{kind}-{ranks}-{rank}.json").read_text("utf8")) for rank in range(ranks)]
    log, first = log_of(run), log_of(folder / "whole-1")
    pairs = list(zip(log, first, strict=True))
    row = {
        "weights": kind,
        "processes": ranks,
        "numbers of a process": told[0]["numbers"],
        "MB in steps": max(one["steps"] for one in told),
        "MB in all, first": told[0]["all"],
        "MB in all, others": max((one["all"] for one in told[1:]), default=None),
        "s a step": statistics.median(line["seconds"] for line in log[MEASURED_FROM:]),
        "CPU s a step": sum(one["cpu"] for one in told) / len(log),
        "differences": sum(one["batch_hash"] != other["batch_hash"] for one, other in pairs),
        "loss differs by": max(abs(one["loss"] / other["loss"] - 1) for one, other in pairs),
    }
    print(row, flush=True)
    return row


SHARDING = {"whole": "none", "shared": "full"}


def measured(config: Row, run: Path) -> Row:
    """Megabytes above those at the beginning, and CPU seconds in steps."""
    import time

    from partita.model import Model
    from partita_trainers import finetune
    from partita_trainers.batch_size.linux import exact_allocations

    take_step, begun, peaks, seconds = finetune.take_step, memory("VmRSS"), [0.0], [0.0]

    def watched(*given: Any, **named: Any) -> Any:
        if named["number"] == MEASURED_FROM:
            peaks[0] = memory("VmHWM")
            Path("/proc/self/clear_refs").write_text("5", encoding="utf8")  # the peak begins again
        started = time.process_time()
        found = take_step(*given, **named)
        seconds[0] += time.process_time() - started
        if named["number"] >= MEASURED_FROM:
            peaks.append(memory("VmHWM"))
        return found

    finetune.take_step = watched  # type: ignore[assignment]
    with exact_allocations():
        Model(config, quiet=True).train(run=run)
    manifest = json.loads((run / "manifest.json").read_text("utf8"))
    return {
        "steps": max(peaks[1:]) - begun,
        "all": max(*peaks, memory("VmHWM")) - begun,
        "cpu": seconds[0],
        "numbers": manifest.get("numbers_of_a_process", manifest["parameters"]),
    }


def memory(name: str) -> float:
    """A number of megabytes that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text("utf8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def log_of(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf8").splitlines()]


if __name__ == "__main__":
    main()
