"""Twenty SIGKILLs of one rank of 2 or 4 at random moments of training, predictions and scores.

A model of 0.3 M parameters learns 600 SNLI-like rows in 60 steps, evaluated every ten and saved every five; then it
answers 1,500 rows in 8 slots a rank, and is scored on 300. Rank and moment are drawn anew for each kill; some fall into
a checkpoint, an evaluation, or the end of a job. Nothing watches the ranks that learn and score: those that are left
have to end by themselves. Those that answer need nobody before the end, and get SIGTERM, as from a launcher. In the
end everything is compared with a job of one process that nobody killed.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forked import Ended, Kill, import_all, run_ranks
from harness import Limit, about, parse_arguments, report
from workloads_data import WHOLE, make_model, settings, snli_rows, write_rows

Row = dict[str, Any]
STEPS = 60


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    kills = (
        {"training": 2, "predictions": 1, "scores": 1}
        if arguments.quick
        else {"training": 11, "predictions": 6, "scores": 3}
    )
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    import_all()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = file_of(folder)
        straight, killed = folder / "straight", folder / "killed"
        table = []
        for work, (job, files, most) in jobs(folder, config).items():
            check(run_ranks(1, partial(on_rank, job, straight), folder=straight), work)
            found = [
                kill_once(partial(on_rank, job, killed), killed, files, most, chance, number / kills[work])
                for number in range(kills[work])
            ]
            check(run_ranks(2, partial(on_rank, job, killed), folder=killed), work)
            hits = [one for one in found if one is not None]
            table.append(
                {
                    "work": work,
                    "kills": len(hits),
                    "ended before": len(found) - len(hits),
                    "seconds to the end, most": round(max((one.seconds_after for one in hits), default=0.0), 1),
                    "ranks that ended well": sum(status == 0 for one in hits for status in one.status),
                    "differences": differences(work, straight, killed),
                }
            )
            print(table[-1], flush=True)
    limits = [
        Limit("differences", sum(row["differences"] for row in table), 0, "max"),
        Limit("kills", sum(row["kills"] for row in table), sum(kills.values()), "min"),
        Limit(
            "seconds from a kill to the end of the job, most",
            max(row["seconds to the end, most"] for row in table),
            10,
            "max",
        ),
    ]
    table.append({"work": f"ranks and moments drawn with seed {seed}"})
    report("distributed_kills", table, limits, arguments=arguments, about=about(__doc__))


def on_rank(job: Callable[[Path], None], run: Path, rank: int) -> None:
    job(run)


def file_of(folder: Path) -> Row:
    write_rows(folder / "rows.jsonl", snli_rows(600))
    write_rows(folder / "others.jsonl", snli_rows(300, seed=1))
    write_rows(folder / "many.jsonl", snli_rows(1500, seed=2))
    others = str(folder / "others.jsonl")
    data = {"source": str(folder / "rows.jsonl"), "split": WHOLE, "validation": others, "test": others}
    config = settings(make_model(folder / "model"), data, max_steps=STEPS, steps_per_checkpoint=5)
    trainer = config["trainer"]
    del trainer["gradient_accumulation_steps"], trainer["skip_all_evaluation"]
    trainer |= {"effective_batch_size": 32, "batch_size": 4, "eval_batch_size": 8, "steps_per_evaluation": 10}
    trainer |= {"max_generated_rows": 16, "evaluate_generated": True}
    return config | {"generation": {"max_new_tokens": 8}}


def jobs(folder: Path, config: Row) -> dict[str, tuple[Callable[[Path], None], str, int]]:
    """What is done in a run's directory; the files whose lines tell how far it is, and about how many they get."""
    from partita.model import Model

    def train(run: Path) -> None:
        Model(config, quiet=True).train(run=run)

    def predict(run: Path) -> None:
        Model.load(run, quiet=True).predict(folder / "many.jsonl", output=run / "answers.jsonl", batch_size=8)

    def score(run: Path) -> None:
        from partita.backends.torchrun import get_process_group

        model = Model.load(run, quiet=True)
        scores = model.evaluate(folder / "others.jsonl", batch_size=4)
        if get_process_group(model.config).rank == 0:
            (run / "scores.json").write_text(json.dumps(scores["label"]), encoding="utf8")

    return {
        "training": (train, "log.jsonl", STEPS),
        "predictions": (predict, "journal/*.jsonl", 1500),
        "scores": (score, "manifest.json", 0),
    }


def kill_once(
    work: Callable[[int], None], run: Path, files: str, most: int, chance: random.Random, share: float
) -> Ended | None:
    """A job with a kill in it, somewhat behind that share of the work; None where it ended before."""
    ranks = chance.choice((2, 4))
    lines = round(most * min(0.97, share + chance.uniform(0, 0.1)))
    delay = chance.uniform(0, 0.1) if most else chance.uniform(0.2, 1.2)
    kill = Kill(chance.randrange(ranks), files, max(1, lines), delay, end_others="journal" in files)
    ended = run_ranks(ranks, work, folder=run, kill=kill)
    return ended if ended.status[kill.rank] == 9 else None


def check(ended: Ended, work: str) -> None:
    if any(ended.status):
        sys.exit(f"{work}: a rank failed")


def differences(work: str, straight: Path, killed: Path) -> int:
    """What is not the same in the two runs."""
    if work == "predictions":
        return int((straight / "answers.jsonl").read_bytes() != (killed / "answers.jsonl").read_bytes())
    if work == "scores":
        return int((straight / "scores.json").read_bytes() != (killed / "scores.json").read_bytes())
    one, other = (
        [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (straight, killed)
    )
    steps = sum(
        a["batch_hash"] != b["batch_hash"] or abs(a["loss"] / b["loss"] - 1) > 1e-3
        for a, b in zip(one, other, strict=True)
    )
    evaluated = [json.loads((run / "manifest.json").read_text())["evaluations"] for run in (straight, killed)]
    return steps + sum(abs(a["loss"] / b["loss"] - 1) > 1e-3 for a, b in zip(*evaluated, strict=True))


if __name__ == "__main__":
    main()
