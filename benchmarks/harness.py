"""Run the parts of a benchmark, print their tables and write their results.

A script calls `main` with its parts: functions that take an empty folder and `quick` and return rows and limits. The
docstring of a part describes it on the page; for a script with a single part, the docstring of the module does.
"""

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from partita.runs.manifest import versions

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SHARED = ROOT.parent / "shared"
Row = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """A required bound on a measured value."""

    name: str
    value: float
    limit: float
    direction: Literal["min", "max"]

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.direction == "min" else self.value <= self.limit


Result = tuple[list[Row], list[Limit]]
"""Rows of the table, and the limits."""
Part = Callable[[Path, bool], Result]


def main(*parts: Part) -> None:
    """Run the parts named on the command line (by default all), each in a separate process.

    `call` restarts the script to run one of its functions.
    """
    script = sys.modules["__main__"]
    if sys.argv[1:2] == ["--call"]:
        print(json.dumps(getattr(script, sys.argv[2])(*json.loads(sys.argv[3]))))
        return
    named = {part.__name__: part for part in parts}
    arguments = parse_arguments(script.__doc__ or "", list(named))
    chosen = [name for name in named if name in arguments.part or not arguments.part]
    stem = Path(script.__file__ or "").stem
    path = arguments.json or (None if arguments.quick else RESULTS / f"{stem}.json")
    names = [record_name(stem, name) for name in named] if len(parts) > 1 else [stem]
    order = names if arguments.json is None else []
    if len(chosen) == 1:
        records = [run_part(named[chosen[0]], alone=len(parts) == 1, quick=arguments.quick)]
        keep(records, path, order=order)
        return
    records, failed = [], []
    for name in chosen:
        record = run_in_process(name, quick=arguments.quick)
        failed += [] if record else [name]
        records += [record] if record else []
        keep(records, path, order=order)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def keep(records: Sequence[Row], path: Path | None, *, order: Sequence[str]) -> None:
    """Write the results so far.

    Args:
        records: Results of parts.
        path: The file; None writes none.
        order: Names of all parts whose results in the file are kept; empty to replace the file.
    """
    if path is None or not records:
        return
    known = {record["name"]: record for record in [*(read_records(path) if order and path.exists() else []), *records]}
    found = [known[name] for name in order or known if name in known]
    stem = Path(sys.modules["__main__"].__file__ or "").stem
    content = found[0] if len(found) == 1 else {"name": stem, "parts": found}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")
    print(f"written to {path}")


def parse_arguments(description: str, parts: Sequence[str]) -> argparse.Namespace:
    """Return the values of --quick, --json and, with several parts, --part."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same work, small enough for two minutes")
    default = "the default is benchmarks/results/NAME.json, and no file with --quick"
    parser.add_argument("--json", type=Path, help=f"file for the result; {default}")
    if len(parts) > 1:
        parser.add_argument("--part", action="append", default=[], choices=parts, help="run this part; repeatable")
    else:
        parser.set_defaults(part=[])
    return parser.parse_args()


def run_part(part: Part, *, alone: bool, quick: bool) -> Row:
    """Run a part in an empty folder; print its table and return its record."""
    script = sys.modules["__main__"]
    stem = Path(script.__file__ or "").stem
    needs_shared = "Needs the shared folder" in f"{script.__doc__ if alone else ''} {part.__doc__}"
    if needs_shared and not SHARED.is_dir():
        sys.exit(f"needs the shared folder at {SHARED}")
    with tempfile.TemporaryDirectory() as name:
        os.environ["PARTITA_CACHE"] = f"{name}/cache"  # no caches of earlier runs
        folder = Path(name, "work")
        folder.mkdir()
        rows, limits = part(folder, quick)
    print_table(rows, limits)
    return {
        "name": stem if alone else record_name(stem, part.__name__),
        "about": " ".join(((script.__doc__ if alone else part.__doc__) or "").split()),
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "rows": rows,
        "limits": [{**asdict(limit), "holds": limit.holds} for limit in limits],
    }


def run_in_process(name: str, *, quick: bool) -> Row | None:
    """Run a part in a separate process, so that memory, imports and patches do not affect the next one.

    Returns its record, or None if it failed, after which the others run.
    """
    print(f"\n{name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        flags = ["--part", name, "--json", str(path), *(["--quick"] if quick else [])]
        if subprocess.run([sys.executable, script_path(), *flags], check=False).returncode:
            return None
        return read_records(path)[0]


def record_name(stem: str, part: str) -> str:
    return f"{stem} {part}"


def read_records(path: Path) -> list[Row]:
    """Return the results in a file: one object for a single part, or a list under `parts`."""
    found: Row = json.loads(path.read_text(encoding="utf8"))
    return list(found.get("parts", [found]))


def print_table(rows: Sequence[Row], limits: Sequence[Limit]) -> None:
    columns = columns_of(rows)
    table = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for limit in limits:
        sign = ">=" if limit.direction == "min" else "<="
        print(f"{'holds' if limit.holds else 'FAILS'}: {limit.name}: {shown(limit.value)} {sign} {shown(limit.limit)}")


def columns_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def describe_parts(path: Path) -> dict[str, str]:
    """Return the descriptions of a script's parts by name, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    documented = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "main"]
    names = [ast.unparse(name) for call in calls for name in call.args]
    if len(names) == 1:
        return {path.stem: ast.get_docstring(tree) or ""}
    return {record_name(path.stem, name): documented[name] or "" for name in names}


# Processes


def command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the command that calls a function of this script in a new process and prints the result as JSON."""
    return [sys.executable, script_path(), "--call", function.__name__, json.dumps(arguments, default=str)]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this script in a new process with one thread."""
    return json.loads(run_script(command(function, *arguments)[1:]).splitlines()[-1])


def run_script(words: Sequence[Any]) -> str:
    """Run a Python script with one thread; return its output. An error ends the benchmark."""
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def peer_environment(folder: Path, *packages: str, same: Sequence[str]) -> tuple[Path | None, str]:
    """Create an environment with packages of a peer; return its folder of programs, or a reason why not.

    Args:
        folder: Where its folder is made.
        packages: Requirements of pip.
        same: Further packages, in our versions. torch always is one.
    """
    programs = folder / "environment" / "bin"
    install = [str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    ours = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", *same)]
    commands = [
        [sys.executable, "-m", "venv", str(programs.parent)],
        [*install, "--requirement", str(ROOT / "requirements-torch.txt")],
        [*install, *packages, *ours],
        [str(programs / "python"), "-c", "import torch; print(torch.__version__)"],
    ]
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "no output").splitlines()[-1]
            return None, f"{', '.join(packages)} cannot be installed: {reason}"
    if (found := done.stdout.strip()) != version("torch"):
        return None, f"{', '.join(packages)} came with torch {found} instead of {version('torch')}"
    return programs, ""


def script_path() -> str:
    return str(Path(sys.modules["__main__"].__file__ or "").resolve())


# Machine and commit


def machine() -> Row:
    """Return processor, cores and memory."""
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory = int(Path("/proc/meminfo").read_text(encoding="utf8").split()[1]) // 2**20
    except (OSError, StopIteration):
        memory = 0
    found = {"processor": name, "cores": os.cpu_count(), "memory_gib": memory, "system": platform.platform()}
    gpus = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return found | ({"gpus": gpus.splitlines()} if gpus else {})


def commit() -> str:
    """Return the measured commit, with `-dirty` if files other than results have changed."""
    unchanged = ["--", ".", ":!benchmarks/results", ":!docs/benchmarks.md"]
    changed = git("status", "--porcelain", *unchanged)
    return (git("rev-parse", "--short", "HEAD") or "none") + ("-dirty" if changed else "")


def git(*words: str) -> str:
    return output_of("git", *words)


def output_of(*words: str) -> str:
    """Return what a program prints, without spaces around it; empty if it fails or does not exist."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
