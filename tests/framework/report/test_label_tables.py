import io
import math
from typing import Any

from rich.console import Console

from partita.report.label_tables import error_table, label_table


def shown(table: Any, *, width: int = 80) -> str:
    """Return a table as it is printed on a terminal of this width."""
    file = io.StringIO()
    Console(file=file, width=width, markup=False).print(table)
    return file.getvalue()


def row(f1: float, support: float = 3.0, **more: float) -> dict[str, float]:
    return {"precision": 0.5, "recall": 0.25, "f1": f1, "support": support, **more}


def test_labels_are_a_table_with_a_row_each() -> None:
    text = shown(label_table("team", {"billing": row(0.5, 1200.0), "[bold]": row(0.25)}))
    assert text.splitlines()[0].rstrip() == "team: labels"
    assert "│ billing │     0.500 │  0.250 │ 0.500 │   1,200 │" in text
    assert "│ [bold]  │     0.500 │  0.250 │ 0.250 │       3 │" in text


def test_of_many_labels_those_with_the_lowest_f1_are_shown() -> None:
    text = shown(label_table("team", {f"label-{number:02}": row(number / 30) for number in range(25)}))
    assert " ".join(text.split()).startswith("team: 20 of 25 labels, lowest F1 first (all with --json)")
    assert "label-19" in text
    assert "label-20" not in text


def test_a_table_of_scored_labels_fits_in_80_columns() -> None:
    text = shown(label_table("team", {"a label of 26 characters ok": row(0.5, auroc=0.5, average_precision=math.nan)}))
    assert max(map(len, text.splitlines())) <= 80
    for word in ("precision", "recall", "f1", "support", "auroc", "average"):
        assert word in text
    assert "nan" not in text


def test_the_most_frequent_errors_come_first_and_right_answers_are_left_out() -> None:
    confusion = [
        {"correct": "a", "answer": "a", "rows": 9},
        {"correct": "a", "answer": "b", "rows": 1},
        {"correct": "b", "answer": None, "rows": 2},
    ]
    lines = shown(error_table("team", confusion)).splitlines()
    assert lines[0].rstrip() == "team: errors"
    assert [line.replace(" ", "") for line in lines[4:6]] == ["│b│(none)│2│", "│a│b│1│"]
    many = [{"correct": "a", "answer": f"b{number}", "rows": number} for number in range(1, 13)]
    text = shown(error_table("team", many))
    assert " ".join(text.split()).startswith("team: 10 of 12 errors, most frequent first (all with --json)")
    assert "b2 " not in text


def test_without_labels_or_errors_there_is_no_table() -> None:
    assert label_table("team", {}) is None
    assert error_table("team", [{"correct": "a", "answer": "a", "rows": 1}]) is None
