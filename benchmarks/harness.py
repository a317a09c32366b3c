"""What every benchmark shares: flags, the machine, a table on the screen, a file with limits that hold or do not."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from partita.runs.manifest import versions

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SHARED = ROOT.parent / "shared"


@dataclass(frozen=True)
class Limit:
    """A promise in numbers."""

    name: str
    value: float
    limit: float
    direction: Literal["min", "max"]

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.direction == "min" else self.value <= self.limit


def parse_arguments(description: str, *, flags: Mapping[str, str] = MappingProxyType({})) -> argparse.Namespace:
    """--quick makes the same work small enough for two minutes; --json says where the result goes.

    `flags` are further switches and what they do.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same work, small enough for two minutes")
    parser.add_argument(
        "--json",
        type=Path,
        help="where the result goes; the default is benchmarks/results/NAME.json, with --quick nowhere",
    )
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()


def run_script(words: Sequence[Any]) -> str:
    """What a Python script prints, run with one thread in a process of its own; its errors end the benchmark."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def report(
    name: str, rows: Sequence[Mapping[str, Any]], limits: Sequence[Limit], *, arguments: argparse.Namespace, about: str
) -> None:
    """Print the table and the limits, and write the file."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for limit in limits:
        sign = ">=" if limit.direction == "min" else "<="
        print(f"{'holds' if limit.holds else 'FAILS'}: {limit.name}: {shown(limit.value)} {sign} {shown(limit.limit)}")
    path = arguments.json or (None if arguments.quick else RESULTS / f"{name}.json")
    if path is not None:
        result = {
            "name": name,
            "about": about,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "rows": list(rows),
            "limits": [{**asdict(limit), "holds": limit.holds} for limit in limits],
        }
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
        print(f"written to {path}")


def about(description: str | None) -> str:
    """The first paragraph of a script's docstring, on one line."""
    return " ".join((description or "").split("\n\n", 1)[0].split())


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = int(Path("/proc/meminfo").read_text(encoding="utf8").split()[1]) // 2**20
    except (OSError, StopIteration):
        memory = 0
    return {"processor": name, "cores": os.cpu_count(), "memory_gib": memory, "system": platform.platform()}


def commit() -> str:
    """The commit that was measured; `-dirty` behind it where files other than results had changed."""
    unchanged = ["--", ".", ":!benchmarks/results", ":!docs/benchmarks.md"]
    changed = git("status", "--porcelain", *unchanged)
    return (git("rev-parse", "--short", "HEAD") or "none") + ("-dirty" if changed else "")


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
