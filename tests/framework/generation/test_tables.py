import csv
import datetime
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from partita.generation.tables import check_output, column_types, plain, write_table
from partita.runs.files import new_file, why_not_written
from partita_schema.errors import DataError, WriteError

ROWS: list[dict[str, Any]] = [
    {"a": 1, "b": 'x, "y"\nz', "c": {"k": [1, None]}, "d": None, "e": True, "f": 1},
    {"a": 2.5, "b": "\u00e4\ud800", "c": "text", "d": None, "e": False, "f": 2},
]


def test_jsonl_contains_the_values(tmp_path: Path) -> None:
    write_table(tmp_path / "new" / "t.jsonl", ROWS, columns=dict.fromkeys(ROWS[0], "json"))
    lines = (tmp_path / "new" / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS


def test_csv_contains_text_and_json(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", ROWS, columns=dict.fromkeys(ROWS[0], "json"))
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"a": "1", "b": 'x, "y"\nz', "c": '{"k": [1, null]}', "d": "", "e": "true", "f": "1"},
        {"a": "2.5", "b": "\u00e4?", "c": "text", "d": "", "e": "false", "f": "2"},
    ]


def test_parquet_has_columns_of_the_narrowest_type(tmp_path: Path) -> None:
    types = column_types(ROWS, columns=list(ROWS[0]))
    assert types == {"a": "number", "b": "text", "c": "json", "d": "text", "e": "boolean", "f": "integer"}
    write_table(tmp_path / "t.parquet", ROWS, columns=types)
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert frame["a"].tolist() == [1.0, 2.5]
    assert frame["c"].tolist() == ['{"k": [1, null]}', '"text"']
    assert (frame["e"].tolist(), frame["f"].tolist()) == ([True, False], [1, 2])
    assert frame["b"].tolist()[1] == "\u00e4?"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_table_without_rows_is_written(tmp_path: Path, ending: str) -> None:
    write_table(tmp_path / f"t.{ending}", [], columns={"a": "text"})
    content = (tmp_path / f"t.{ending}").read_bytes()
    assert content == {"jsonl": b"", "csv": b"a\r\n"}.get(ending, content)
    if ending == "parquet":
        assert list(pd.read_parquet(tmp_path / "t.parquet").columns) == ["a"]


@pytest.mark.parametrize(("name", "result"), [("t.xlsx", "the ending '.xlsx'"), ("t", "no ending")])
def test_an_unknown_file_extension_is_refused(tmp_path: Path, name: str, result: str) -> None:
    with pytest.raises(DataError) as caught:
        write_table(tmp_path / name, [], columns={})
    assert str(caught.value) == f"{tmp_path / name} has {result}; predictions are written as .jsonl, .csv or .parquet"


def test_a_failed_table_keeps_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_table(path, [{"a": 1}], columns={"a": "json"})

    def failing() -> Any:
        yield {"a": 2}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_table(path, failing(), columns={"a": "json"})
    assert path.read_text(encoding="utf-8") == '{"a": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from partita.generation.tables import write_table
from partita_schema.errors import WriteError
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    write_table(Path(sys.argv[1]), ({"a": "x" * 50} for _ in range(2000)), columns={"a": "text"})
except WriteError as error:
    print(error)
"""


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_full_disk_is_reported_and_leaves_no_partial_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t.{ending}"
    script = FULL_DISK.replace('"x" * 50', "__import__('random').randbytes(40).hex()")
    output = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert output == (
        f"{path} cannot be written: File too large; raise the limit on the size of files, or write to another path. "
        "The answers are saved; rerun the same command afterwards\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_values_without_a_json_type_are_converted() -> None:
    value = {
        "when": datetime.date(2026, 11, 1),
        "never": pd.NaT,
        "number": np.int32(3),
        "share": np.float64("nan"),
        "list": np.array([1.5, 2.0]),
        "other": 1 + 2j,
        "pair": (1, float("inf")),
    }
    assert plain(value) == {
        "when": "2026-11-01",
        "never": None,
        "number": 3,
        "share": None,
        "list": [1.5, 2.0],
        "other": "(1+2j)",
        "pair": [1, None],
    }


def test_integers_beyond_64_bits_are_text_in_columns() -> None:
    assert column_types([{"a": 2**63}], columns=["a"]) == {"a": "json"}


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device; make room"),
        (errno.EROFS, "Read-only file system; write to another path"),
        (errno.EACCES, "Permission denied; change the permissions there, or write to another path"),
        (errno.ENOENT, "No such file or directory; its folder is gone or takes no new files; write to another path"),
        (errno.EISDIR, "Is a directory; name a file in that directory"),
        (errno.EIO, "Input/output error; write to another path"),
    ],
)
def test_each_reason_why_a_file_cannot_be_written_has_specific_advice(number: int, advice: str) -> None:
    message = why_not_written(OSError(number, os.strerror(number)), Path("o.csv"))
    assert message == f"o.csv cannot be written: {advice}"


def test_an_output_that_cannot_be_written_is_reported_before_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "folder.csv").mkdir()
    for name, reason in (
        ("folder.csv", "Is a directory; name a file in that directory"),
        ("file/o.csv", "Not a directory; there is a file where a folder is needed; write to another path"),
        ("file/a/o.csv", "Not a directory; there is a file where a folder is needed; write to another path"),
        (f"{'x' * 300}.csv", "File name too long; write a shorter name"),
    ):
        with pytest.raises(DataError) as caught:
            check_output(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name} cannot be written: {reason}"


def test_the_check_of_an_output_leaves_nothing_behind(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep" / "o.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_kept_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "rows.dat").write_text("before", encoding="utf-8")
    (tmp_path / "second").symlink_to("there/rows.dat")
    for name, target in (("t.jsonl", "second"), ("new.jsonl", "there/new/rows.dat")):
        (tmp_path / name).symlink_to(target)
        check_output(tmp_path / name)
        write_table(tmp_path / name, [{"a": 1}], columns={"a": "json"})
        assert (tmp_path / name).readlink() == Path(target)
        assert (tmp_path / name).read_text(encoding="utf-8") == '{"a": 1}\n'
    assert {path.name for path in tmp_path.iterdir()} == {"there", "second", "t.jsonl", "new.jsonl"}
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"rows.dat", "new"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
def test_a_link_of_another_user_in_a_shared_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("untouched", encoding="utf-8")
    (tmp_path / "t.jsonl").symlink_to("secret")
    os.chown(tmp_path / "t.jsonl", 12345, 12345, follow_symlinks=False)
    tmp_path.chmod(0o1777)
    message = (
        f"{tmp_path / 't.jsonl'} cannot be written: A symbolic link of another user in a folder that everybody may "
        "write; symbolic links are not followed there; remove the link, or name its target"
    )
    with pytest.raises(DataError) as caught:
        check_output(tmp_path / "t.jsonl")
    assert str(caught.value) == message
    with pytest.raises(WriteError) as failed:
        write_table(tmp_path / "t.jsonl", [{"a": 1}], columns={"a": "json"})
    assert str(failed.value).startswith(message)
    assert (tmp_path / "secret").read_text(encoding="utf-8") == "untouched"
    tmp_path.chmod(0o755)
    write_table(tmp_path / "t.jsonl", [{"a": 1}], columns={"a": "json"})
    assert (tmp_path / "secret").read_text(encoding="utf-8") == '{"a": 1}\n'


def test_files_next_to_an_output_are_not_opened_through_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("untouched", encoding="utf-8")
    for name in ("t.jsonl.partial", ".t.jsonl.partial", ".t.jsonl.0123456789abcdef.partial"):
        (tmp_path / name).symlink_to("secret")
    write_table(tmp_path / "t.jsonl", [{"a": 1}], columns={"a": "json"})
    assert (tmp_path / "secret").read_text(encoding="utf-8") == "untouched"


def test_links_in_a_cycle_or_to_a_device_are_refused(tmp_path: Path) -> None:
    for name, target in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl"), ("null.jsonl", "/dev/null")):
        (tmp_path / name).symlink_to(target)
    for name, reason in (
        (
            "a.jsonl",
            (
                "Too many levels of symbolic links; symbolic links are not followed there; remove the link, or name "
                "its target"
            ),
        ),
        ("null.jsonl", "Not a regular file; write to another path"),
    ):
        with pytest.raises(DataError) as caught:
            check_output(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name} cannot be written: {reason}"


def test_files_of_killed_processes_are_removed_and_files_being_written_are_kept(tmp_path: Path) -> None:
    left = tmp_path / ".t.jsonl.0123456789abcdef.partial"
    left.write_text("half a line", encoding="utf-8")
    with new_file(tmp_path / "t.jsonl"):
        write_table(tmp_path / "t.jsonl", [{"a": 1}], columns={"a": "json"})
        assert len(list(tmp_path.glob(".*.partial"))) == 1
    assert not left.exists()


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"]
HARMLESS = ["-3", "+4.5", "-1e-7", "a=b", "3-4", "", "plain; text"]


def test_cells_with_formulas_are_escaped_on_request(tmp_path: Path) -> None:
    rows = [{"=name": text, "number": -1.5} for text in (*FORMULAS, *HARMLESS)]
    write_table(tmp_path / "t.csv", rows, columns=dict.fromkeys(rows[0], "json"), safe_csv=True)
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        header, *results = list(csv.reader(file))
    assert header == ["'=name", "number"]
    assert [cell for cell, _ in results] == [*(f"'{text}" for text in FORMULAS), *HARMLESS]
    assert {number for _, number in results} == {"-1.5"}
    write_table(tmp_path / "t.csv", rows, columns=dict.fromkeys(rows[0], "json"))
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        assert [cell for cell, _ in list(csv.reader(file))[1:]] == [*FORMULAS, *HARMLESS]


def test_safe_csv_is_refused_for_other_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^safe_csv is for \.csv files, and .*o\.jsonl is another one; leave it out$"):
        check_output(tmp_path / "o.jsonl", safe_csv=True)
