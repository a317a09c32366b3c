"""The details of a run on a terminal, at most 80 columns wide, and how to continue it."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from partita.report.number_text import age_text, as_number, bytes_text
from partita.report.runs_table import WIDEST
from partita.report.train_command import train_command
from partita.runs.listing import RunSummary, data_of, model_of, size_of
from partita.runs.settings import leaves
from partita.runs.sweep_record import sweep_of
from partita_schema.common.text import counted

FILES = {
    "model": "the model",
    "checkpoints": "to resume or extend the training",
    "evaluations": "results of rows",
    "transcripts": "dialogues",
    "journal": "answers",
    "rounds": "rounds of self-training",
    "report.html": "the report",
    "log.jsonl": "steps",
    "references.jsonl": "log-probabilities before training",
    "quarantine.jsonl": "rows left out, with reasons",
    "ledger.json": "counts of rows",
    "config.yaml": "the configuration",
}
"""What is in a run directory, the most wanted first."""
HIGHLIGHTS = (
    *("trainer.type", "adapter.type", "adapter.r", "quantization.bits", "trainer.learning_rate", "trainer.epochs"),
    *("trainer.max_steps", "trainer.optimizer.type", "trainer.validation_metric", "data.batching.type", "seed"),
)
"""Keys of the configuration in the details of a run."""


def print_run(run: RunSummary, console: Console, *, now: float) -> None:
    """Print the details of a run: status, configuration, data, metrics, batch sizes, files, and what to do next.

    Args:
        run: The run.
        console: Where to print.
        now: The time in seconds since 1970.
    """
    table = Table(box=None, pad_edge=False, show_header=False, width=min(console.width, WIDEST), padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts_of(run, now=now):
        table.add_row(name, value)
    console.print(table, highlight=False)
    if run.metrics:
        console.print()
        console.print(metric_table(run.metrics, width=min(console.width, WIDEST)), highlight=False)
    for heading, lines in (("files", list(files_of(run.folder))), ("next", next_commands(run))):
        if lines:
            console.print(f"\n{heading}", style="bold")
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def facts_of(run: RunSummary, *, now: float) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run, by name."""
    manifest, config = run.manifest, run.config
    yield "run", str(run.folder)
    meaning = {
        "dead": "dead: its process ended without recording why, such as after a kill",
        "outputs": "outputs: answers or dialogues of a model that was not trained here",
    }
    yield "status", f"{meaning.get(run.status, run.status)} ({age_text(now - run.updated)} ago)"
    if run.problem:
        yield "problem", run.problem
    if not config:
        return
    yield "model", model_of(config)
    yield "data", data_of(manifest)
    counts = {split: values.get("rows") for split, values in (manifest.get("data") or {}).items()}
    rows = {split: number for split, number in counts.items() if number is not None}  # of a stream it is not known
    left_out = sum(number for number in (manifest.get("ledger") or {}).values() if isinstance(number, int))
    if rows:
        skipped = f"; {counted(left_out, 'row')} left out" if left_out else ""
        yield "rows", ", ".join(f"{number:,} {split}" for split, number in rows.items()) + skipped
    yield "inputs", ", ".join(feature["name"] for feature in config.get("input_features") or ()) or "documents"
    yield (
        "outputs",
        ", ".join(f"{one['name']} ({one['type']})" for one in config.get("output_features") or ()) or "text",
    )
    known = leaves(config)
    yield "settings", ", ".join(f"{key} {known[key]}" for key in HIGHLIGHTS if known.get(key) not in (None, {}, []))
    if manifest.get("steps"):
        yield "steps", steps_of(manifest)
    sizes = manifest.get("batch_sizes") or {}
    if sizes:
        yield "batch sizes", ", ".join(f"{name} {size['rows']:,} ({size['origin']})" for name, size in sizes.items())
    if manifest.get("created"):
        yield "created", f"{manifest['created']}, {counted(int(manifest.get('starts', 1)), 'start')}"
    yield "size", bytes_text(run.bytes)


def steps_of(manifest: Mapping[str, Any]) -> str:
    """Return how many steps were taken, and which are the best."""
    text = f"{manifest['steps']:,}"
    if manifest.get("best_step") is not None:
        text += f", the best at step {manifest['best_step']:,}"
    return text + (", stopped early" if manifest.get("stopped_early") else "")


def metric_table(metrics: Mapping[str, Mapping[str, float]], *, width: int) -> Table:
    """Return a table of metrics by split."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("metric", overflow="fold", max_width=width // 2)
    for split in metrics:
        table.add_column(split, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for values in metrics.values() for name in values):
        table.add_row(name, *(as_number(name, values.get(name)) for values in metrics.values()))
    return table


def files_of(folder: Path) -> Iterator[str]:
    """Yield the files of a run with their sizes and meanings."""
    names = [name for name in FILES if (folder / name).exists()]
    for name in names:
        slash = "/" if (folder / name).is_dir() else ""
        yield f"  {name + slash:<18} {bytes_text(size_of(folder / name)):>9}  {FILES[name]}"


def next_commands(run: RunSummary) -> list[str]:
    """Return the commands that use or continue a run."""
    if run.status == "running":
        return ["  it is running; press Ctrl-C in its terminal to interrupt it"]
    if run.status == "done":
        folder = shlex.quote(str(run.folder))
        return [f"  partita predict {folder} --dataset ROWS --output FILE", f"  partita evaluate {folder}"]
    if run.status in ("outputs", "unreadable"):
        return []
    return continue_commands(run)


def continue_commands(run: RunSummary) -> list[str]:
    """Return the command that continues a run; with where its file was, if the file is gone or has changed."""
    command = shlex.split(run.manifest.get("command") or "")
    if command[:2] == ["partita", "sweep"]:
        return [f"  {shlex.join(command)}"]
    sweep = sweep_of(run.folder)
    if sweep is not None:
        return [
            f"  {shlex.join(['partita', 'sweep', 'FILE', '--folder', str(sweep)])}",
            f"  FILE: the file of the sweep {sweep}, of which this run is a trial",
        ]
    words = train_command(run.folder, run.manifest, to=run.folder)
    if words is not None:
        return [f"  {shlex.join(words)}"]
    origin = run.manifest.get("folder", ".")
    return [
        f"  {shlex.join(['partita', 'train', 'FILE', '--run', str(run.folder)])}",
        f"  FILE: its file in {origin} has changed or is gone; {run.folder / 'config.yaml'} is a copy",
    ]
