"""Batch sizes in words: the sentence, the table and the points of the charts, for the terminal and for pages.

Needs no heavy library. Memory is in powers of 1000, as in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita_schema.counted import counted
from partita_trainers.batch_size.probe import BatchSize, ProbeResult

PREFILL_TITLES = {"generation": "prefill s", "evaluation": "forward s", "training": "step s"}
"""What `prefill_seconds` is, by purpose."""
IN_SIGHT = 0.25
"""Share of the budget that has to be taken for the budget to be drawn."""


@dataclass(frozen=True)
class ProbeTable:
    """The sizes that were tried, in the order they were."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    used: Sequence[bool]
    """Whether the row is about the size that is used."""


def heading(purpose: str, size: BatchSize) -> str:
    """One sentence: the size, where it comes from, and what it was measured for."""
    facts = [f"{name} {rows:,}" for name, rows in (("fits", size.max_fitting), ("best", size.best)) if rows is not None]
    found = f"{purpose}: {counted(size.rows, 'row')}" + (f" ({', '.join(facts)})" if facts else "")
    told = [text for text in (worst_case(purpose, size), token_limit(size), allowance(size), refusal(size)) if text]
    return f"{found}, {origin(size)}" + (f"; {', '.join(told)}" if told else "")


def origin(size: BatchSize) -> str:
    """Where the size comes from."""
    if size.origin == "file":
        return "as the file says"
    if size.origin == "default":
        return "the default"
    found = "tuned" if size.origin == "tuned" else "found earlier and tried again"
    return f"{found} in {digits(size.seconds)} s on {size.device}"


def worst_case(purpose: str, size: BatchSize) -> str:
    """The longest rows; empty where they are not known."""
    if size.prompt_tokens is None:
        return ""
    if purpose != "generation":
        return f"rows of at most {counted(size.prompt_tokens, 'token')}"
    return f"prompts of at most {counted(size.prompt_tokens, 'token')} and {size.new_tokens or 0:,} new ones"


def token_limit(size: BatchSize) -> str:
    return "" if size.max_tokens is None else f"max_tokens {size.max_tokens:,}"


def allowance(size: BatchSize) -> str:
    return "" if size.budget_bytes is None else f"{memory(size.budget_bytes)} may be taken"


def refusal(size: BatchSize) -> str:
    """Empty unless the device ran out of memory after the size had been found."""
    in_a_probe = any(probe.verdict == "out of memory" for probe in size.probes)
    return "memory ran out since" if size.out_of_memory and not in_a_probe else ""


def probe_table(purpose: str, size: BatchSize) -> ProbeTable:
    """What was tried; columns that would say nothing new are left out."""
    columns: dict[str, list[str]] = {
        "rows": [f"{probe.rows:,}" for probe in size.probes],
        "peak": [memory(probe.used_bytes) for probe in size.probes],
        "taken": [memory(probe.taken_bytes) for probe in size.probes],
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
    """Probes whose memory was measured, with the bytes that the device gave for them; the smallest first."""
    taken = [(probe, probe.used_bytes if probe.taken_bytes is None else probe.taken_bytes) for probe in size.probes]
    return sorted(((probe, held) for probe, held in taken if held is not None), key=lambda point: point[0].rows)


def refused_rows(size: BatchSize) -> list[int]:
    """Sizes at which the device ran out of memory."""
    return sorted({probe.rows for probe in size.probes if probe.verdict == "out of memory"})


def speed_points(size: BatchSize) -> list[tuple[int, float]]:
    """(rows, rows of the data a second) of all sizes whose speed is known; the smallest first."""
    probed = {probe.rows: probe.rows_per_second for probe in size.probes if probe.rows_per_second is not None}
    return sorted((probed | dict(size.throughputs)).items())


def most_rows(size: BatchSize) -> int:
    """The most rows that something is known of: where charts end."""
    return max(
        [probe.rows for probe in size.probes]
        + [rows for rows, _ in size.throughputs]
        + [size.rows, size.max_fitting or 1]
    )


def budget_in_sight(size: BatchSize) -> int | None:
    """The budget; None where a chart that shows it could show nothing else, or where there is none."""
    highest = max((held for _, held in memory_points(size)), default=0)
    if size.budget_bytes is None or (highest < IN_SIGHT * size.budget_bytes and not refused_rows(size)):
        return None
    return size.budget_bytes


def measured(sizes: Mapping[str, BatchSize]) -> dict[str, BatchSize]:
    """Those of which there is something to draw."""
    return {name: size for name, size in sizes.items() if memory_points(size) or speed_points(size)}


def memory(held: float | None) -> str:
    """Bytes to three digits; empty for None."""
    if held is None:
        return ""
    for unit, power in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if held < 999.5 * power:
            return f"{digits(held / power)} {unit}"
    return f"{digits(held / 10**12)} TB"


def digits(number: float | None) -> str:
    """Three digits, or all of those before the point; empty for None."""
    if number is None:
        return ""
    for places, limit in ((4, 0.0995), (3, 0.9995), (2, 9.995), (1, 99.95)):
        if 0 < number < limit:
            return f"{number:.{places}f}"
    return f"{number:,.0f}"
