import json
from pathlib import Path
from typing import Any

import pytest

from partita.data.ledger import Ledger, UsedRows, read_counts, read_quarantine
from partita.data.rows import BadRow
from partita_schema.errors import DataError

from ...json_lines import read_json_lines


def leave_out(ledger: Ledger, number: int, *reasons: str) -> None:
    row = {"a": number}
    ledger.leave_out(f"a.csv:{number}", reasons, split="training", file="a.csv", number=number, row=row)


def quarantine(folder: Path) -> list[dict[str, object]]:
    return read_json_lines(folder / "quarantine.jsonl")


def test_every_row_is_counted_and_bad_ones_are_kept_with_reasons(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=2)
    ledger.use(UsedRows(7, cut=2, cut_tokens=30, loss_tokens=90, unknown_tokens=1), split="training")
    leave_out(ledger, 3, "too long", "no label")
    ledger.leave_out_unreadable([BadRow("a.csv:9", "a.csv", 9, "not UTF-8", "x?")], split="training")
    ledger.use(UsedRows(1), split="test")
    ledger.check()
    ledger.save()

    saved = json.loads((tmp_path / "ledger.json").read_text())
    assert saved["splits"] == {
        "training": {
            "rows": 9,
            "used": 7,
            "cut": 2,
            "cut_tokens": 30,
            "loss_tokens": 90,
            "unknown_tokens": 1,
            "widened_spans": 0,
            "widened_such_as": "",
            "left_out": 2,
            "reasons": {"too long": 1, "no label": 1, "not UTF-8": 1},
        },
        "test": {
            "rows": 1,
            "used": 1,
            "cut": 0,
            "cut_tokens": 0,
            "loss_tokens": 0,
            "unknown_tokens": 0,
            "widened_spans": 0,
            "widened_such_as": "",
            "left_out": 0,
            "reasons": {},
        },
    }
    common = {"split": "training", "file": "a.csv"}
    assert quarantine(tmp_path) == [
        {"key": "a.csv:3", **common, "number": 3, "reasons": ["too long", "no label"], "row": {"a": 3}},
        {"key": "a.csv:9", **common, "number": 9, "reasons": ["not UTF-8"], "row": "x?"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.json", "quarantine.jsonl"]


def test_a_second_save_keeps_what_was_saved(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=9)
    leave_out(ledger, 1, "x")
    ledger.save()
    leave_out(ledger, 2, "x")
    ledger.save()
    ledger.save()

    assert [record["number"] for record in quarantine(tmp_path)] == [1, 2]


def test_a_new_ledger_starts_empty(tmp_path: Path) -> None:
    for number in (1, 2):
        ledger = Ledger(tmp_path, max_bad_rows=9)
        leave_out(ledger, number, "x")
        ledger.save()

    assert [record["number"] for record in quarantine(tmp_path)] == [2]


def test_large_and_unusual_rows_are_saved_as_truncated_text(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=9)
    location = {"split": "training", "file": "f", "number": 1}
    ledger.leave_out("k", ["x"], row={"a": "y" * 9000}, **location)  # type: ignore[arg-type]
    ledger.leave_out("k", ["x"], row={"a": Path("p"), "b": "\ud800"}, **location)  # type: ignore[arg-type]
    circular: list[Any] = []
    circular.append(circular)
    ledger.leave_out("k", ["x"], row={"a": {(1, 2): 3}}, **location)  # type: ignore[arg-type]
    ledger.leave_out("k", ["x"], row={"a": circular}, **location)  # type: ignore[arg-type]
    ledger.save()

    large, odd, *no_json = quarantine(tmp_path)
    assert len(str(large["row"])) == 2000
    assert odd["row"] == {"a": "p", "b": "\ud800"}
    assert [one["row"] for one in no_json] == ["{'a': {(1, 2): 3}}", "{'a': [[...]]}"]


@pytest.mark.parametrize(("limit", "bad"), [(2, 2), (0.5, 5), (0, 0), (1.0, 10)])
def test_the_accepted_number_of_bad_rows_does_not_stop_the_run(limit: float, bad: int) -> None:
    ledger = Ledger(None, max_bad_rows=limit)
    for number in range(bad):
        leave_out(ledger, number, "x")
    ledger.use(UsedRows(10 - bad), split="training")

    ledger.check()


def test_the_share_is_one_of_all_rows_also_before_all_are_read() -> None:
    ledger = Ledger(None, max_bad_rows=0.01, num_rows={"training": 900, "validation": 100})
    ledger.use(UsedRows(rows=900), split="training")
    ledger.leave_out_unreadable([BadRow(f"a:{n}", "a", n, "broken", "{") for n in range(10)], split="training")
    ledger.check()
    ledger.leave_out_unreadable([BadRow("a:10", "a", 10, "broken", "{")], split="training")
    with pytest.raises(DataError, match=r"^11 of 1,011 rows cannot be used, and data.max_bad_rows accepts 0.01 of"):
        ledger.check()


def test_too_many_bad_rows_stop_with_the_most_frequent_reasons(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=0.01)
    ledger.use(UsedRows(1000), split="training")
    for number in range(20):
        leave_out(ledger, number, "too long" if number % 4 else "no label")

    with pytest.raises(DataError) as error:
        ledger.check()

    assert str(error.value) == (
        "20 of 1,020 rows cannot be used, and data.max_bad_rows accepts 0.01 of all rows; "
        f"see {tmp_path}/quarantine.jsonl:\n"
        "  15 x too long (such as a.csv:1)\n"
        "  5 x no label (such as a.csv:0)"
    )
    assert len(quarantine(tmp_path)) == 20


def test_reasons_that_are_not_listed_are_counted(tmp_path: Path) -> None:
    ledger = Ledger(None, max_bad_rows=0)
    for number in range(300):
        leave_out(ledger, number, f"reason {number % 50}")

    lines = ledger.main_reasons().splitlines()

    assert lines[0] == "  6 x reason 0 (such as a.csv:0)"
    assert lines[5:] == ["  270 x other reasons"]


def test_the_limit_may_be_a_number_of_bad_rows() -> None:
    ledger = Ledger(None, max_bad_rows=1, num_rows={"training": 40, "validation": 10})
    leave_out(ledger, 1, "x")
    leave_out(ledger, 2, "x")

    with pytest.raises(
        DataError, match=r"^2 of 50 rows cannot be used, and data.max_bad_rows accepts 1 row:\n  2 x x "
    ):
        ledger.check()


def test_too_many_different_reasons_are_counted_together() -> None:
    ledger = Ledger(None, max_bad_rows=999)
    for number in range(300):
        leave_out(ledger, number, f"reason {number}")

    reasons = ledger.split("training").reasons
    assert reasons["other reasons"] == 200
    assert reasons.total() == 300
    with pytest.raises(DataError, match=r"295 x other reasons \(such as a.csv:100\)"):
        Ledger.check(replaced(ledger))


def replaced(ledger: Ledger) -> Ledger:
    stricter = Ledger(None, max_bad_rows=0)
    for number in range(300):
        leave_out(stricter, number, f"reason {number}")
    assert stricter.splits == ledger.splits
    return stricter


def test_a_resumed_ledger_counts_every_row_once(tmp_path: Path) -> None:
    first = Ledger(tmp_path, max_bad_rows=9, resumable=True)
    first.use(UsedRows(4, cut=1, cut_tokens=3), split="training")
    leave_out(first, 1, "too long")
    position = first.state()
    first.use(UsedRows(4), split="training")
    leave_out(first, 2, "no label")  # after the position, killed before any save

    for _ in range(10):
        again = Ledger(tmp_path, max_bad_rows=9, resumable=True)
        again.leave_out("v.csv:8", ["too long"], split="validation", file="v.csv", number=8)
        again.save()
        again.load(position)
        assert again.state() == position
        assert again.split("training").reasons == {"too long": 1}
        leave_out(again, 2, "no label")

    again.save()
    assert [row["key"] for row in quarantine(tmp_path)] == ["v.csv:8", "a.csv:1", "a.csv:2"]
    assert json.loads((tmp_path / "ledger.json").read_text())["splits"]["training"]["left_out"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.json", "quarantine.jsonl"]


def test_rows_that_are_read_again_are_counted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=9, resumable=True)
    ledger.leave_out("v.csv:8", ["too long"], split="validation", file="v.csv", number=8)
    start = ledger.state()
    for _ in range(3):
        ledger.load(start)
        ledger.use(UsedRows(4), split="training")
        leave_out(ledger, 1, "too long")

    assert (ledger.split("training").rows, ledger.split("training").reasons) == (5, {"too long": 1})
    assert [row["key"] for row in quarantine(tmp_path)] == ["v.csv:8", "a.csv:1"]
    assert not (tmp_path / ".quarantine.jsonl.earlier").exists()


def test_a_kill_before_the_position_is_loaded_loses_no_reasons(tmp_path: Path) -> None:
    first = Ledger(tmp_path, max_bad_rows=9, resumable=True)
    leave_out(first, 1, "too long")
    position = first.state()
    for _ in range(2):  # read its validation rows, then killed
        killed = Ledger(tmp_path, max_bad_rows=9, resumable=True)
        killed.leave_out("v.csv:8", ["no label"], split="validation", file="v.csv", number=8)
        killed.save()

    again = Ledger(tmp_path, max_bad_rows=9, resumable=True)
    again.load(position)

    assert again.split("training").reasons == {"too long": 1}
    assert [row["key"] for row in quarantine(tmp_path)] == ["a.csv:1"]


def test_rows_without_saved_reasons_are_still_counted(tmp_path: Path) -> None:
    first = Ledger(tmp_path, max_bad_rows=0, resumable=True)
    leave_out(first, 1, "too long")
    position = first.state()
    (tmp_path / "quarantine.jsonl").unlink()

    again = Ledger(tmp_path, max_bad_rows=0, resumable=True)
    again.load(position)

    with pytest.raises(DataError, match=r"1 x before the run was continued$"):
        again.check()


def test_a_partial_line_of_the_quarantine_is_skipped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=9)
    leave_out(ledger, 1, "too long")
    ledger.save()
    with (tmp_path / "quarantine.jsonl").open("a") as file:
        file.write('{"key": "a.csv:2", "spl')

    assert [row["key"] for row in read_quarantine(tmp_path / "quarantine.jsonl")] == ["a.csv:1"]


def test_a_fraction_of_bad_rows_applies_after_a_thousand_rows_of_a_stream() -> None:
    ledger = Ledger(None, max_bad_rows=0.01)
    leave_out(ledger, 1, "x")
    ledger.use(UsedRows(10), split="training")
    ledger.check_so_far()
    with pytest.raises(DataError, match="1 of 11 rows"):
        ledger.check()
    ledger.use(UsedRows(989), split="training")
    ledger.check_so_far()
    for number in range(10):
        leave_out(ledger, number, "x")
    with pytest.raises(DataError, match="11 of 1,010 rows"):
        ledger.check_so_far()


def test_too_many_bad_rows_stop_a_stream_at_once() -> None:
    ledger = Ledger(None, max_bad_rows=0)
    leave_out(ledger, 1, "x")
    with pytest.raises(DataError, match="1 of 1 row"):
        ledger.check_so_far()


def test_a_damaged_ledger_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    with pytest.raises(DataError) as error:
        read_counts(tmp_path)
    assert str(error.value) == (f"{tmp_path}/ledger.json is damaged (KeyError: 'splits'); the run writes it again")
