"""Evaluate a new model, train it, and evaluate it again on unseen bookings.

    python demo.py [FOLDER]

Writes the data and two runs into FOLDER (default: runs/table_booking) and prints a table.
"""

import json
import shutil
import sys
import time
from pathlib import Path

from make_data import write

SHOWN = ("loss", "accuracy", "exact_match")
"""Suffixes of the metrics in the table; manifest.json of the run has all metrics."""

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    """Run the demo; a second start resumes a stopped run."""
    from rich.console import Console
    from rich.table import Table

    from partita import Model
    from partita.runs.log import show_log

    show_log(quiet=False)
    console = Console()
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "data", rows=6000, seed=1)
    for name in ("zero_shot", "finetune"):
        shutil.copy(HERE / f"{name}.yaml", folder)

    console.rule("before: trainer: {type: none}")
    before = Model(folder / "zero_shot.yaml").train(run=folder / "before").metrics["test"]

    console.rule("fine-tuning")
    model = Model(folder / "finetune.yaml")
    result = model.train(run=folder / "after")
    after = result.metrics["test"]

    console.rule("predictions on unseen rows")
    predictions = model.predict(folder / "data" / "test.jsonl", output=folder / "predictions.jsonl")
    for row in predictions[:4]:
        answer = {key: row[key] for key in ("guests", "day", "time", "name")}
        console.print(row["request"], "\n    ->", json.dumps(answer), highlight=False)

    table = Table(title=f"{len(predictions)} unseen test rows", title_justify="left")
    for column in ("metric", "before", "after"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric in [name for name in after if name.endswith(SHOWN)]:
        table.add_row(metric, f"{before[metric]:.3f}", f"{after[metric]:.3f}")
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} seconds")
    console.print(f"the run is in {result.run}, the predictions in {predictions.path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/table_booking"))
