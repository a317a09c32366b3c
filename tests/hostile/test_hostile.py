"""Tests with mutated configurations and data files: each gives rows or an error message, with little memory.

Each has at most a minute of CPU time; benchmarks/robustness.py measures their time and memory.
PARTITA_FUZZ_SEED chooses other mutations; a failure names the seed and the number of its file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEED = int(os.environ.get("PARTITA_FUZZ_SEED", "17"))
ALL = 190
"""Mutations of each kind; benchmarks/robustness.py runs 2,000."""
MOST_MEGABYTES = 500
MOST_SAID = 60_000
"""The maximum length of an error message."""


def outcomes(kind: str, count: int, folder: Path) -> list[dict[str, Any]]:
    """Return the outcomes of the first mutations."""
    home = Path(__file__).parent
    words = [sys.executable, home / "program.py", kind, home, SEED, 0, count]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["number"] for case in results] == list(range(count))
    return results


def check(case: dict[str, Any]) -> None:
    place = f"mutation {case['number']} with PARTITA_FUZZ_SEED={SEED}: {case}"
    assert "traceback" not in case, f"{place}\n{case['traceback']}"
    assert case["megabytes"] < MOST_MEGABYTES, place
    assert case["said"] < MOST_SAID, place
    assert not case.get("unaccounted"), place


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["configs", "data"])
def test_mutated_files_give_rows_or_an_error_message(kind: str, tmp_path: Path) -> None:
    results = outcomes(kind, ALL, tmp_path)
    for case in results:
        check(case)
    assert any(case["outcome"] == "refused" for case in results)  # the mutations must cause errors
