"""JSON Lines files: rows written by tests, and logs of runs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def read_json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def log_of(run: Path) -> list[dict[str, Any]]:
    """Return the logged steps of a run without their times."""
    lines = read_json_lines(run / "log.jsonl")
    assert all(line.pop("seconds") > 0 for line in lines)
    return lines
