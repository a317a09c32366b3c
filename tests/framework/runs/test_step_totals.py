import json
from pathlib import Path
from typing import Any

import pytest

from partita.runs.step_totals import step_totals


def write(path: Path, *records: dict[str, Any], end: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + end, encoding="utf8")
    return path


def test_the_totals_are_sums_over_the_lines(tmp_path: Path) -> None:
    step = {"rows": 4, "tokens": 75, "loss_tokens": 10, "padding": 0.25, "seconds": 0.5, "loss": 1.0}
    log = write(tmp_path / "log.jsonl", {"step": 1, **step}, {"step": 2, **step, "padding": 0.0}, end='{"step": 3, "r')
    totals = step_totals(log)
    assert json.dumps([totals["rows"], totals["padding"]]) == "[8, 25]"
    assert totals == {
        "rows": 8,
        "tokens": 150,
        "loss_tokens": 20,
        "seconds": 1.0,
        "padding": 25,
        "padding_share": pytest.approx(25 / 175),
        "tokens_per_second": 150.0,
    }


def test_a_value_that_some_lines_lack_has_no_sum(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"step": 1, "rows": 4, "tokens": 9}, {"step": 2, "rows": 4})
    assert step_totals(log) == {"rows": 8}


def test_a_run_without_logged_steps_has_no_totals(tmp_path: Path) -> None:
    assert step_totals(tmp_path / "log.jsonl") == {}
    assert step_totals(write(tmp_path / "log.jsonl")) == {}
