"""Sums over the logged steps of a run: all of its starts, epochs and processes."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partita_schema.common.json_text import parse_json

SUMMED = ("rows", "tokens", "loss_tokens", "seconds")


def step_totals(log: Path) -> dict[str, float]:
    """Return the sums over the lines of log.jsonl, of the values that all lines have; {} without lines.

    The keys are `rows`, `tokens` (without padding), `loss_tokens`, `padding` (tokens), `padding_share` of all tokens,
    `seconds` (durations of the steps) and `tokens_per_second`.
    """
    sums: dict[str, float] = dict.fromkeys((*SUMMED, "padding"), 0)
    lines: Counter[str] = Counter()
    count = 0
    for record in records_of(log):
        count += 1
        values = {name: record[name] for name in SUMMED if isinstance(record.get(name), int | float)}
        share = record.get("padding")
        if "tokens" in values and isinstance(share, int | float) and share < 1:
            values["padding"] = round(values["tokens"] * share / (1 - share))
        for name, value in values.items():
            sums[name] += value
            lines[name] += 1
    totals: dict[str, float] = {name: sums[name] for name in sums if count and lines[name] == count}
    if "padding" in totals:
        totals["padding_share"] = totals["padding"] / max(1, totals["tokens"] + totals["padding"])
    if "tokens" in totals and totals.get("seconds"):
        totals["tokens_per_second"] = totals["tokens"] / totals["seconds"]
    return totals


def records_of(log: Path) -> Iterable[dict[str, Any]]:
    """Yield the lines of log.jsonl, without torn and damaged ones."""
    if not log.is_file():
        return
    with log.open("rb") as file:
        for line in file:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
