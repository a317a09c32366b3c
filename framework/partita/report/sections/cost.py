"""What a run took, and how to repeat it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partita.report.batch_sizes import heading, memory_points, speed_points
from partita.report.charts import Chart, Curve, Mark, Table, curve_chart
from partita.report.number_text import bytes_text, duration
from partita.report.run_record import RunRecord
from partita.report.section import Charts, Command, Folded, NamedTable, Part, Section
from partita.report.train_command import overrides_of, train_command
from partita.runs.manifest import RUNS
from partita.runs.origin import data_options
from partita.runs.sweep_record import TRIALS, sweep_of
from partita_schema.common.text import counted
from partita_trainers.batch_size.probe import BatchSize

MAX_CONFIG = 100_000
"""Characters of a configuration."""


def cost_section(run: RunRecord) -> Section | None:
    """Return the time, memory and batch sizes of a run; None if nothing was recorded."""
    rows = [[name, value] for name, value in costs_of(run).items()]
    sizes = sizes_of(run.manifest.get("batch_sizes") or {})
    parts: list[Part] = [NamedTable("What the run took", Table(["", ""], rows))] if rows else []
    headings = [list(heading(purpose, size).split(": ", 1)) for purpose, size in sizes.items()]
    parts += [NamedTable("Batch sizes", Table(["", ""], headings), numbers=False)] if headings else []
    charts = [chart for purpose, size in sizes.items() for chart in size_charts(purpose, size)]
    parts += [Charts(charts)] if charts else []
    return Section("Cost", parts) if parts else None


def costs_of(run: RunRecord) -> dict[str, str]:
    """Return times, memory, and numbers of rows, tokens and parameters, by name."""
    manifest, costs = run.manifest, dict[str, str]()
    batches: Mapping[str, Any] = {**(manifest.get("batches") or {}), **waits_of(manifest)}
    recorded: Mapping[str, Any] = manifest.get("cost") or {}
    seconds = float(np.nansum(run.steps["seconds"])) if len(run.steps["step"]) else 0.0
    if seconds:
        costs["time in training steps"] = duration(seconds)
    for key, label in (("seconds", "total time"), ("cpu_seconds", "CPU time"), ("gpu_seconds", "GPU time")):
        if isinstance(recorded.get(key), int | float):
            costs[label] = duration(float(recorded[key]))
    for key, label in (("peak_memory_bytes", "peak memory"), ("peak_gpu_memory_bytes", "peak GPU memory")):
        if isinstance(recorded.get(key), int | float):
            costs[label] = bytes_text(float(recorded[key]))
    counts = (("rows", "rows trained on", "{:,.0f}"), ("tokens", "tokens trained on", "{:,.0f}"))
    shares = (("padding_share", "padding", "{:.1%}"), ("wait_share", "time spent waiting for rows", "{:.1%}"))
    for key, label, form in (*counts, *shares):
        if isinstance(batches.get(key), int | float):
            costs[label] = form.format(batches[key])
    for key, label in (("parameters", "parameters"), ("trained_parameters", "trained parameters")):
        if manifest.get(key):
            costs[label] = f"{manifest[key]:,}"
    return costs


def waits_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of the time that was spent waiting for rows, as `wait_share`; {} if only a part is known."""
    waits: Mapping[str, Any] = manifest.get("waits") or {}
    return {"wait_share": waits.get("wait_share")} if manifest.get("starts", 1) == 1 else {}


def sizes_of(records: Mapping[str, Any]) -> dict[str, BatchSize]:
    """Return the batch sizes of a manifest by purpose, without those that cannot be read."""
    sizes = {}
    for purpose in ("training", "evaluation", "generation"):
        if isinstance(records.get(purpose), Mapping):
            try:
                sizes[purpose] = BatchSize.from_record(records[purpose])
            except TypeError:
                continue
    return sizes


def size_charts(purpose: str, size: BatchSize) -> list[Chart]:
    """Return the charts of speed and memory by batch size; none if the size was not measured."""
    charts, mark = [], [Mark(float(size.rows), f"in use: {size.rows:,} rows")]
    note = f"The dotted line is the size in use, {counted(size.rows, 'row')}."
    speeds = speed_points(size)
    if len(speeds) > 1:
        rows, values = zip(*speeds, strict=True)
        curve = Curve("rows per second", rows, values, dots=True)
        title = f"Speed by batch size, {purpose}"
        chart = curve_chart(
            title, [curve], x_label="rows", y_label="rows per second", marks=mark, include=(0,), note=note
        )
        charts.append(chart)
    points = memory_points(size)
    if len(points) > 1:
        divisor, unit = (1e9, "GB") if max(used for _, used in points) >= 1e9 else (1e6, "MB")
        curve = Curve("memory", [probe.rows for probe, _ in points], [used / divisor for _, used in points], dots=True)
        title = f"Memory by batch size, {purpose}"
        chart = curve_chart(title, [curve], x_label="rows", y_label=unit, marks=mark, include=(0,), note=note)
        charts.append(chart)
    return charts


def repeat_section(run: RunRecord) -> Section | None:
    """Return the command that repeats the run, its configuration and versions; None for a folder without a run."""
    manifest = run.manifest
    if not manifest:
        return None
    commit = (manifest.get("code") or {}).get("commit") if isinstance(manifest.get("code"), Mapping) else None
    facts = {"created": manifest.get("created"), "seed": manifest.get("seed"), "device": manifest.get("device")}
    facts |= {"commit": commit, "started by": manifest.get("command")}
    rows = [[name, str(value)] for name, value in facts.items() if value is not None]
    rows += [
        [f"{split} rows", f"{row_counts(values)}fingerprint {values.get('fingerprint', '')}"]
        for split, values in (manifest.get("data") or {}).items()
        if isinstance(values, Mapping)
    ]
    versions = [[name, str(version)] for name, version in (manifest.get("versions") or {}).items()]
    config = run.config_text or json.dumps(manifest.get("config", {}), indent=2)
    if len(config) > MAX_CONFIG:
        config = f"{config[:MAX_CONFIG]}\n... (shortened; all of it is in config.yaml)"
    return Section(
        "How to repeat it",
        [
            Command("Command", "\n".join(map(shlex.join, repeat_commands(run)))),
            NamedTable("The run", Table(["", ""], rows), numbers=False),
            Folded("Configuration", config),
            NamedTable("Versions", Table(["package", "version"], versions), numbers=False, folded=True),
        ],
    )


def repeat_commands(run: RunRecord) -> list[list[str]]:
    """Return the words of the commands that repeat a run.

    The file of a run that was started in Python, or whose file has changed, is its copy in the run directory. It is
    copied to where the run was started, because that is where relative paths in it begin.
    """
    again = folder_to_repeat(run.folder)
    words = train_command(run.folder, run.manifest, to=again)
    if words is not None:
        return [words]
    copy, file = run.folder / "config.yaml", Path(run.manifest.get("folder") or ".") / f"{again.name}.yaml"
    changes = overrides_of(run.manifest, copy) or []
    return [
        ["cp", str(copy), str(file)],
        ["partita", "train", str(file), "--run", str(again), *data_options(run.manifest), *changes],
    ]


def folder_to_repeat(folder: Path) -> Path:
    """Return a run directory in which to train a run again: next to it, but for a trial outside of its sweep."""
    sweep = sweep_of(folder)
    if sweep is None:
        return folder.with_name(f"{folder.name}-again")
    return RUNS / "-".join([sweep.name, *folder.relative_to(sweep / TRIALS).parts, "again"])


def row_counts(record: Mapping[str, Any]) -> str:
    """Return the number of rows of a split; empty for a stream, whose length is not known."""
    rows = record.get("rows")
    return f"{rows:,}, " if isinstance(rows, int) else ""
