"""Batch sizes as a sentence, a table and points of charts, for the terminal and for pages.

This module needs no heavy library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.report.number_text import bytes_text, digits
from partita_schema.common.text import counted
from partita_trainers.batch_size.probe import BatchSize, ProbeResult

PREFILL_TITLES = {"generation": "prefill s", "evaluation": "forward s", "training": "step s"}
"""Column title of `prefill_seconds`, by purpose."""
IN_SIGHT = 0.25
"""Minimum fraction of the budget in use for the budget to be drawn."""


@dataclass(frozen=True)
class ProbeTable:
    """The sizes that were probed, in order."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    used: Sequence[bool]
    """Whether the row is the size in use."""


def heading(purpose: str, size: BatchSize) -> str:
    """Return one sentence: the size, its origin, and what it was measured for."""
    facts = [f"{name} {rows:,}" for name, rows in (("fits", size.max_fitting), ("best", size.best)) if rows is not None]
    sentence = f"{purpose}: {counted(size.rows, 'row')}" + (f" ({', '.join(facts)})" if facts else "")
    notes = [text for text in (worst_case(purpose, size), token_limit(size), allowance(size), refusal(size)) if text]
    return f"{sentence}, {origin(size)}" + (f"; {', '.join(notes)}" if notes else "")


def origin(size: BatchSize) -> str:
    """Describe the origin of the size."""
    if size.origin == "file":
        return "as the file says"
    if size.origin == "max_tokens":
        return "as many of the longest as data.batching.max_tokens allows"
    if size.origin == "default":
        return "the default"
    source = "tuned" if size.origin == "tuned" else "cached and checked again"
    return f"{source} in {digits(size.seconds)} s on {size.device}"


def worst_case(purpose: str, size: BatchSize) -> str:
    """Describe the longest rows; empty if they are not known."""
    if size.prompt_tokens is None:
        return ""
    if purpose != "generation":
        return f"rows of at most {counted(size.prompt_tokens, 'token')}"
    return f"prompts of at most {counted(size.prompt_tokens, 'token')} and {size.new_tokens or 0:,} new tokens"


def token_limit(size: BatchSize) -> str:
    """Describe the token limit of a batch; empty without one."""
    return "" if size.max_tokens is None else f"max_tokens {size.max_tokens:,}"


def allowance(size: BatchSize) -> str:
    """Describe the memory budget; empty without one."""
    return "" if size.budget_bytes is None else f"{bytes_text(size.budget_bytes)} may be taken"


def refusal(size: BatchSize) -> str:
    """Return a note if memory ran out after the size was found; else empty."""
    in_a_probe = any(probe.verdict == "out of memory" for probe in size.probes)
    return "memory ran out since" if size.out_of_memory and not in_a_probe else ""


def probe_table(purpose: str, size: BatchSize) -> ProbeTable:
    """Return the table of probes, without columns that add nothing."""
    columns: dict[str, list[str]] = {
        "rows": [f"{probe.rows:,}" for probe in size.probes],
        "peak": [bytes_text(probe.used_bytes) for probe in size.probes],
        "taken": [bytes_text(probe.taken_bytes) for probe in size.probes],
        PREFILL_TITLES[purpose]: [digits(probe.prefill_seconds) for probe in size.probes],
        "decode s": [digits(probe.decode_seconds) for probe in size.probes],
        "rows/s": [digits(probe.rows_per_second) for probe in size.probes],
        "verdict": [probe.verdict for probe in size.probes],
    }
    if columns["taken"] == columns["peak"]:
        del columns["taken"]
    if not any(probe.decode_seconds for probe in size.probes):
        del columns["decode s"]
    rows = list(zip(*columns.values(), strict=True))
    return ProbeTable(tuple(columns), rows, [probe.rows == size.rows for probe in size.probes])


def memory_points(size: BatchSize) -> list[tuple[ProbeResult, int]]:
    """Return probes with measured memory, and the bytes taken from the device; the smallest first."""
    taken = [(probe, probe.used_bytes if probe.taken_bytes is None else probe.taken_bytes) for probe in size.probes]
    return sorted(((probe, used) for probe, used in taken if used is not None), key=lambda point: point[0].rows)


def refused_rows(size: BatchSize) -> list[int]:
    """Return the sizes at which the device ran out of memory."""
    return sorted({probe.rows for probe in size.probes if probe.verdict == "out of memory"})


def speed_points(size: BatchSize) -> list[tuple[int, float]]:
    """Return (rows, rows per second) for all sizes with a known speed; the smallest first."""
    probed = {probe.rows: probe.rows_per_second for probe in size.probes if probe.rows_per_second is not None}
    return sorted((probed | dict(size.throughputs)).items())


def max_rows(size: BatchSize) -> int:
    """Return the largest number of rows with any data, where charts end."""
    return max(
        [probe.rows for probe in size.probes]
        + [rows for rows, _ in size.throughputs]
        + [size.rows, size.max_fitting or 1]
    )


def budget_in_sight(size: BatchSize) -> int | None:
    """Return the budget; None without one, or if showing it would squeeze the rest of a chart."""
    highest = max((used for _, used in memory_points(size)), default=0)
    if size.budget_bytes is None or (highest < IN_SIGHT * size.budget_bytes and not refused_rows(size)):
        return None
    return size.budget_bytes


def drawable_sizes(sizes: Mapping[str, BatchSize]) -> dict[str, BatchSize]:
    """Return the sizes with data to draw."""
    return {name: size for name, size in sizes.items() if memory_points(size) or speed_points(size)}
