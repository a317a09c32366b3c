"""Test of the damage benchmark with few cases: with damaged files, the result is correct or the error is reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.long
def test_forty_random_damages_give_the_correct_result_or_an_error_message(tmp_path: Path) -> None:
    result = tmp_path / "damage.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "robustness.py"), "--quick", "--part", "damage", "--json", str(result)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    actual = json.loads(result.read_text(encoding="utf8"))
    assert all(limit["holds"] for limit in actual["limits"]), done.stdout
    assert {row["files"] for row in actual["rows"]} == {
        "checkpoint",
        "journal",
        "manifest",
        "saved model",
        "transcripts",
    }
    assert all(row["damages"] == 8 for row in actual["rows"])
    assert sum(row["same result, fallback named"] for row in actual["rows"]) >= 5
