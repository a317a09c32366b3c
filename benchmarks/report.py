"""CPU seconds to write the report page of a run of 100,000 steps with 50,000 evaluated rows, and its size.

The runs are made up: a classifier with ten labels and prompts of 150 characters, and dpo on pairs with such prompts and
answers of 20 to 150 characters. The second row of each also reads the results of the base model on the same rows and
compares them. Each page is written in a separate process. The seconds are medians of five, without imports.
"""

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import Limit, Result, Row, call, main

from partita.runs.manifest import versions
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path, line_of
from partita_schema.common.checksums import sealed
from partita_schema.load import load_config
from partita_schema.records import FORMAT_VERSION

STEPS, ROWS, ROUNDS = 100_000, 50_000, 5
MOST_SECONDS, MOST_MB = 1.0, 1.0
LABELS = [f"team {number}" for number in range(10)]
CONFIG = {
    "base_model": "org/model",
    "input_features": [{"name": "message", "type": "text"}],
    "output_features": [{"name": "team", "type": "category", "decoder": {"labels": LABELS}}],
    "trainer": {"type": "finetune"},
}


def page(folder: Path, quick: bool) -> Result:
    """Write the page of each made-up run, with and without results of the base model."""
    steps, rows = (STEPS // 10, ROWS // 10) if quick else (STEPS, ROWS)
    table = []
    cases = [(kind, has_base) for kind in KINDS for has_base in (False, True)]
    for kind, has_base in cases:
        name = f"{kind}, result{' and base model' if has_base else ''}"
        run = write_run(folder / f"{kind}-{has_base}", KINDS[kind], steps=steps, rows=rows, has_base=has_base)
        written = [call(write_page, run) for _ in range(1 if quick else ROUNDS)]
        seconds = statistics.median(one["CPU s"] for one in written)
        table.append({"evaluated": name, "steps": steps, "rows": rows, "CPU s": seconds, "MB": written[0]["MB"]})
    return table, [
        Limit("CPU seconds to write the page", max(row["CPU s"] for row in table), MOST_SECONDS, "max"),
        Limit("MB of the page", max(row["MB"] for row in table), MOST_MB, "max"),
    ]


def write_page(name: str) -> Row:
    import time

    from partita.report.run_page import write_report

    started = time.process_time()
    path = write_report(Path(name))
    return {"CPU s": round(time.process_time() - started, 3), "MB": round(path.stat().st_size / 1e6, 3)}


def write_run(folder: Path, kind: "Kind", *, steps: int, rows: int, has_base: bool) -> Path:
    folder.mkdir()
    manifest = {
        "format_version": FORMAT_VERSION,
        "status": "done",
        "versions": versions(),
        "config": load_config(kind.config).config.model_dump(mode="json"),
        "steps": steps,
        "evaluations": [
            {"step": step, "split": "validation", "loss": 6 / math.sqrt(step)}
            for step in range(steps // 100, steps + 1, steps // 100)
        ],
    }
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)), encoding="utf8")
    (folder / "config.yaml").write_text(json.dumps(kind.config), encoding="utf8")
    rng = random.Random(1)
    with (folder / "log.jsonl").open("w", encoding="utf8") as file:
        file.writelines(json.dumps(step_of(step, rng) | kind.metrics(rng)) + "\n" for step in range(1, steps + 1))
    for is_base in (False, True) if has_base else (False,):
        header = EvaluationHeader("test", "base" if is_base else "result", "f00d", steps, kind.outputs)
        results = (kind.row(index, rng, 0.3 if is_base else 0.9) for index in range(rows))
        path = evaluation_path(folder, "test", base=is_base)
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(line_of(header))
            file.writelines(map(line_of, results))
    return folder


def step_of(step: int, rng: random.Random) -> Row:
    return {
        "step": step,
        "epoch": step / 1000,
        "loss": 6 / math.sqrt(step) + 0.1 * rng.random(),
        "learning_rate": 1e-4,
        "gradient_norm": rng.lognormvariate(0, 0.5),
        "rows": 16,
        "loss_tokens": 32,
        "tokens": rng.randint(300, 500),
        "padding": 0.096983,
        "seconds": round(0.05 + 0.01 * rng.random(), 4),
        "batch_hash": f"{rng.getrandbits(64):016x}",
    }


def classified(index: int, rng: random.Random, share: float) -> RecordedRow:
    """Return a row of the classifier; `share` of them are right."""
    reference = rng.choice(LABELS)
    value = reference if rng.random() < share else rng.choice(LABELS)
    result = {"team": OutputResult(reference, value, reference == value)}
    return RecordedRow(f"rows.jsonl:{index}", words(rng, 20), value, round(rng.random(), 6), 3, result)


def compared(index: int, rng: random.Random, share: float) -> RecordedRow:
    """Return a pair; in `share` of them the chosen answer is preferred."""
    rewards = sorted((rng.gauss(0, 1), rng.gauss(0, 1)), reverse=rng.random() < share)
    numbers = {"rewards/chosen": rewards[0], "rewards/rejected": rewards[1]}
    numbers |= {"logps/chosen": -50 * rng.random(), "logps/rejected": -50 * rng.random()}
    of_row = numbers | {"rejected": words(rng, rng.randint(3, 20))}
    result = {"answer": OutputResult(words(rng, rng.randint(3, 20)), None, None, of_row=of_row)}
    return RecordedRow(f"rows.jsonl:{index}", words(rng, 20), None, rng.random(), 40, result)


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"word{rng.randint(0, 999)}" for _ in range(count))


def pair_metrics(rng: random.Random) -> Row:
    """Return the metrics that training on pairs logs in a step."""
    names = ("chosen", "rejected", "accuracies", "margins")
    metrics = {f"rewards/{name}": rng.random() for name in names}
    return metrics | {"logps/chosen": -rng.random(), "logps/rejected": -rng.random(), "chosen_falls": 0.5}


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    config: Row
    outputs: dict[str, str]
    """Type of each output."""
    row: Callable[[int, random.Random, float], RecordedRow]
    metrics: Callable[[random.Random], Row] = lambda _: {}
    """Further metrics of a step."""


PAIRS = {
    "base_model": "org/model",
    "input_features": [{"name": "message", "type": "text"}],
    "output_features": [{"name": "answer", "type": "preference"}],
    "trainer": {"type": "preference"},
}
KINDS = {
    "classifier": Kind(CONFIG, {"team": "category"}, classified),
    "pairs": Kind(PAIRS, {"answer": "preference"}, compared, pair_metrics),
}


if __name__ == "__main__":
    main(page)
