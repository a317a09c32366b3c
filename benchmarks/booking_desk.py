"""The booking desk: what its own mistakes cost a model, and what rounds of training on them gain.

The file is that of examples/booking_desk, with its seed and the next one. Each row is what 600 dialogues come to whose
guests no training has met. The ceiling is what a desk can expect that makes no mistake but by what it could not hear:
without repairs (0.9 + 0.1 / 12) to the power of five, with two what also two repetitions lose; without repairs the one
of these very guests stands beside it. The control is trained on written dialogues instead of rounds, for the CPU time
that rounds took in all.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, Limit, about, parse_arguments, report

EXAMPLE = ROOT / "examples" / "booking_desk"
DIALOGUES = 600
HEARD = 0.9 + 0.1 / 12
"""Chance that a value is right: heard, or else guessed among twelve."""
CEILINGS = {0: HEARD**5, 2: (1 - 0.1 * 0.1 * (1 - HEARD)) ** 5}
"""By rounds of repairs: a wrong value is said again, and may be lost again."""


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    seeds = (42,) if arguments.quick else (42, 43)
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in EXAMPLE.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        import make_bookings

        make_bookings.main(Path("bookings.jsonl"))
        warm_up()
        for seed in seeds:
            table += story(seed)
    total = {seed: sum(row["CPU seconds"] for row in table if row["seed"] == seed) for seed in seeds}

    def least(what: str) -> float:
        return float(min(row["success"] for row in table if row["what"] == what))

    def most(what: str) -> float:
        return float(max(row["success"] for row in table if row["what"] == what))

    limits = [
        Limit("gold history, least", least(GOLD), 0.99, "min"),
        Limit("predicted history, least", least(PREDICTED), 0.56, "min"),
        Limit("predicted history, most", most(PREDICTED), 0.63, "max"),
        Limit("after two rounds, least", least(SECOND), 0.94, "min"),
        Limit("after two rounds over the control, least", least(SECOND) - most(CONTROL), 0.1, "min"),
        Limit("CPU seconds of the whole story of a seed, most", max(total.values()), 360, "max"),
    ]
    report("booking_desk", table, limits, arguments=arguments, about=about(__doc__))


GOLD, PREDICTED = "written dialogues, gold history", "written dialogues, predicted history"
REPAIRED, CONTROL = "written dialogues, two repairs", "as many seconds more of written dialogues, two repairs"
FIRST, SECOND = "after one round, two repairs", "after two rounds, two repairs"


def story(seed: int) -> list[dict[str, Any]]:
    """All rows of a seed."""
    run = Path(f"desk-{seed}")
    seconds, result = timed(lambda: model(seed).train(run=run))
    noted = json.loads((run / "manifest.json").read_text("utf8"))
    assert [found["kept"] for found in noted["rounds"]] == [True, True]
    logs = [steps_of(run), steps_of(run / "rounds" / "1"), steps_of(run / "rounds" / "2")]
    before = sum(line["seconds"] for line in logs[0])
    control, more = run / "control", round(len(logs[0]) * max(0.0, seconds - before) / before)
    overrides = {"base_model": str(run / "rounds" / "0" / "model"), "trainer.max_steps": more}
    spent, _ = timed(lambda: model(seed, **overrides, **{"simulation.self_training": None}).train(run=control))
    rounds = [run / "rounds" / number / "model" for number in "012"]
    rows = [
        asked(seed, GOLD, rounds[0], history="gold", repairs=0),
        asked(seed, PREDICTED, rounds[0], repairs=0),
        asked(seed, REPAIRED, rounds[0]),
        asked(seed, CONTROL, control / "model") | {"steps": len(logs[0]) + more},
        asked(seed, FIRST, rounds[1]) | {"steps": len(logs[0]) + len(logs[1])},
        asked(seed, SECOND, rounds[2]) | {"steps": result.steps},
    ]
    rows[0] |= {"steps": len(logs[0]), "CPU seconds": round(rows[0]["CPU seconds"] + before, 1)}
    rows[3]["CPU seconds"] = round(rows[3]["CPU seconds"] + spent, 1)
    rows[5]["CPU seconds"] = round(rows[5]["CPU seconds"] + seconds - before, 1)
    return [{"steps": len(logs[0])} | row for row in rows]


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The log of a run."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text("utf8").splitlines()]


def model(seed: int, **overrides: Any) -> Any:
    """The model of the example's file, with values by dotted key."""
    from partita import Model

    words = [f"seed={seed}", *(f"{key}={json.dumps(value)}" for key, value in overrides.items())]
    return Model("config.yaml", overrides=words, quiet=True)


def asked(seed: int, what: str, weights: Path, *, history: str = "predicted", repairs: int = 2) -> dict[str, Any]:
    """What 600 dialogues with these weights come to."""
    overrides = {
        "base_model": str(weights),
        "trainer": {"type": "none", "batch_size": 64},
        "simulation.self_training": None,
        "simulation.history": [history],
        "simulation.tasks": {"count": DIALOGUES},
        "simulation.checker.rounds": repairs,
    }
    output = Path("transcripts") / f"{seed}-{what}"
    seconds, simulation = timed(lambda: model(seed, **overrides).simulate(output))
    outcomes = simulation.histories[history]
    success = outcomes.means["exact_last"] if history == "gold" else outcomes.means["success"]
    row = {
        "seed": seed,
        "what": what,
        "success": round(success.mean, 4),
        "ceiling": 1.0 if history == "gold" else round(CEILINGS[repairs], 4),
        **({"ceiling of these guests": round(ceiling_of(seed), 4)} if history == "predicted" and not repairs else {}),
        "turns": round(outcomes.turns, 2),
        "CPU seconds": round(seconds, 1),
    }
    print(row, flush=True)
    return row


def ceiling_of(seed: int) -> float:
    """What a desk can expect of the guests that a seed gives, without repairs: one in twelve of what is lost."""
    import desk

    from partita.data.episode import derived_seed

    total = 0.0
    for number in range(DIALOGUES):
        known: dict[str, str] = {}
        for text, _ in desk.wishes_of(derived_seed(seed, f"task-{number}")):
            words = text.removeprefix("no , ").replace(",", " ").split()
            known |= dict(zip(words[::2], words[1::2], strict=False)) if text != "book" else {}
        total += float((1 / desk.VALUES) ** sum(word == desk.LOST for word in known.values()))
    return total / DIALOGUES


def timed(work: Any) -> tuple[float, Any]:
    """CPU seconds of some work, and what it gives."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def warm_up() -> None:
    """Import what is imported once."""
    import torch

    import partita.model

    torch.set_num_threads(1)
    assert partita.model


if __name__ == "__main__":
    main()
