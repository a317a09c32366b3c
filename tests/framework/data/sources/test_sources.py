import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from partita.data.formats.base import WRITE_ENCODING
from partita.data.formats.datasets_loading import quiet_datasets
from partita.data.rows import Rows
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError
from partita_schema.sections.sources import FileSource

ROWS = [{"question": f"why {i}?", "answer": f"because {i}"} for i in range(5)]


def all_of(rows: Rows) -> list[dict[str, Any]]:
    return rows.get(range(len(rows)))


def write(path: Path, kind: str) -> Path:
    with quiet_datasets():
        table = datasets.Dataset.from_list(ROWS)
        if kind == "csv":
            path.write_text("question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in ROWS))
        elif kind == "tsv":
            path.write_text("question\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS))
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
        elif kind == "json":
            path.write_text(json.dumps(ROWS, indent=2))
        elif kind == "parquet":
            table.to_parquet(path)
        else:
            table.save_to_disk(path.parent / "saved")
            next((path.parent / "saved").glob("*.arrow")).rename(path)
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet", "arrow"])
def test_every_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    write(tmp_path / f"rows.{kind}", kind)

    rows = open_rows(f"rows.{kind}", folder=tmp_path)

    assert all_of(rows) == ROWS
    assert rows.columns == ("question", "answer")
    assert rows.get([3, 0]) == [ROWS[3], ROWS[0]]
    assert rows.bad == ()


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        tuple(ROWS),
        {"question": [r["question"] for r in ROWS], "answer": np.array([r["answer"] for r in ROWS])},
        pd.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        datasets.Dataset.from_list(ROWS),
    ],
    ids=["list", "tuple", "dict", "frame", "table", "dataset"],
)
def test_data_in_memory_gives_the_same_rows_and_fingerprint(dataset: Any, tmp_path: Path) -> None:
    rows = open_rows(dataset, folder=tmp_path)

    assert all_of(rows) == ROWS
    assert [rows.key(i) for i in (0, 4)] == ["dataset:1", "dataset:5"]
    assert rows.fingerprint == open_rows(ROWS, folder=tmp_path).fingerprint


def test_names_of_columns_that_are_numbers_become_texts() -> None:
    rows = open_rows([{0: "n", "a": "x"}, {0: "m", "a": "y"}], folder=Path())
    assert rows.columns == ("0", "a")
    assert rows.get([1]) == [{"0": "m", "a": "y"}]


def test_a_text_file_gives_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\n\n  second \r\nbad \xff\n")

    rows = open_rows(tmp_path / "a.txt", folder=Path("elsewhere"))

    assert all_of(rows) == [{"text": "first"}, {"text": "  second "}]
    assert [bad.key for bad in rows.bad] == ["a.txt:4"]


def test_cells_are_not_converted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        '\ufeffid,day,note\n007,2020-01-01,"two\nlines, ""quoted"""\n1e3,,NA\n', encoding="utf-8"
    )

    rows = open_rows("a.csv", folder=tmp_path)

    assert all_of(rows) == [
        {"id": "007", "day": "2020-01-01", "note": 'two\nlines, "quoted"'},
        {"id": "1e3", "day": "", "note": "NA"},
    ]
    assert [rows.key(0), rows.key(1)] == ["a.csv:2", "a.csv:4"]


def test_json_rows_keep_their_keys_and_types(tmp_path: Path) -> None:
    written = [{"a": {"x": 1}}, {"a": {"y": 1.5}}, {"a": "2020-01-01T00:00:00", "b": [1, "two"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in written))

    rows = open_rows("a.jsonl", folder=tmp_path)

    assert all_of(rows) == written
    assert rows.columns == ("a", "b")
    assert rows.key(2) == "a.jsonl:5"


def test_broken_lines_are_reported_and_the_others_kept(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b'{"a": ', b"[1]", b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a": 2}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))

    rows = open_rows("a.jsonl", folder=tmp_path)

    assert all_of(rows) == [{"a": 1}, {"a": 2}]
    assert [(bad.key, bad.file, bad.number) for bad in rows.bad] == [
        (f"a.jsonl:{n}", "a.jsonl", n) for n in range(2, 7)
    ]
    reasons = [bad.reason for bad in rows.bad]
    assert reasons[0] == "not JSON: Expecting value at character 6"
    assert reasons[1:4] == [
        "a row is a JSON object, this is a list",
        f"not UTF-8: byte 0xff at position 8; {WRITE_ENCODING}",
        "not Unicode: half of a surrogate pair",
    ]
    assert reasons[4] == "nested more than 100 levels deep"
    assert max(len(bad.raw) for bad in rows.bad) == 500


def test_broken_csv_rows_are_reported_and_the_others_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n3,4,5\n6\n\xff,7\n8,"x"y\n9,"10\n11,12\n')

    rows = open_rows("a.csv", folder=tmp_path)

    assert all_of(rows) == [{"a": "1", "b": "2"}, {"a": "11", "b": "12"}]
    assert [(bad.number, bad.reason) for bad in rows.bad] == [
        (3, "3 cells, the header has 2"),
        (4, "1 cell, the header has 2"),
        (5, "not UTF-8; write its encoding at the source, such as encoding: cp1252, or save the file as UTF-8"),
        (6, "broken CSV: ',' expected after '\"'"),
        (7, "broken CSV: a quote opens here that is never closed"),
    ]


def test_an_unclosed_quote_loses_one_row_of_a_large_file(tmp_path: Path) -> None:
    line = "x" * 999 + "\n"
    (tmp_path / "a.csv").write_text('a\nfirst\n"open\n' + line * 1100)

    rows = open_rows("a.csv", folder=tmp_path, max_row_bytes=1_000_000)

    assert [(bad.number, bad.reason) for bad in rows.bad] == [
        (3, "broken CSV: a quote opens here that is never closed")
    ]
    assert len(rows) == 1101


def test_many_broken_csv_rows_do_not_accumulate_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + 'good\n"x"y\n' * 20_000)

    rows = open_rows("a.csv", folder=tmp_path)

    assert (len(rows), len(rows.bad)) == (20_000, 20_000)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2], "b": ["x", "y"]}',
        '{"data": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]}',
        '{"a": 1, "b": "x"}\n{"a": 2, "b": "y"}\n',
        '  [{"a": 1, "b": "x"},\n {"a": 2, "b": "y"}]',
    ],
    ids=["columns", "wrapped", "lines", "array"],
)
def test_json_files_of_every_common_shape_are_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)

    assert all_of(open_rows("a.json", folder=tmp_path)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ({"messages": [USER, BOT]}, [{"messages": [USER, BOT]}]),
        ({"messages": [USER, BOT], "tools": [{"name": "a"}, {"name": "b"}]}, 1),
        ({"conversations": SAID}, [{"conversations": SAID}]),
        ({"messages": [[USER, BOT], [USER, BOT]]}, [{"messages": [USER, BOT]}] * 2),
        ({"conversations": [{"messages": [USER, BOT]}] * 3}, [{"messages": [USER, BOT]}] * 3),
        ({"mails": SAID}, SAID),
    ],
)
def test_a_json_file_that_is_one_dialogue_is_one_row(value: Any, rows: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(value, indent=2))

    assert all_of(open_rows("a.json", folder=tmp_path)) == ([value] if rows == 1 else rows)


@pytest.mark.parametrize("length", [2**20 + 1, 2**20 - len('{"a": ""}'), 2**20 - len('{"a": ""}\n')])
def test_lines_in_a_json_file_may_be_longer_than_a_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "long.json").write_text(json.dumps({"a": "x" * length}) + '\n{"a": "y"}\n')
    rows = open_rows("long.json", folder=tmp_path)
    assert [len(row["a"]) for row in rows.get([0, 1])] == [length, 1]


def test_a_json_array_larger_than_a_read_is_read_completely(tmp_path: Path) -> None:
    written = [{"a": "é" * (i * 7 % 3000), "n": i} for i in range(1500)]
    (tmp_path / "a.json").write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")

    assert all_of(open_rows("a.json", folder=tmp_path)) == written


@pytest.mark.parametrize("compressed", ["a.jsonl.gz", "a.csv.gz"])
def test_compressed_files_are_read(compressed: str, tmp_path: Path) -> None:
    text = '{"a": "1"}\n' if "jsonl" in compressed else "a\n1\n"
    (tmp_path / compressed).write_bytes(gzip.compress(text.encode()))

    assert all_of(open_rows(compressed, folder=tmp_path)) == [{"a": "1"}]


def test_files_of_a_glob_are_read_in_order_with_distinct_keys(tmp_path: Path) -> None:
    for folder, number in (("y", 2), ("x", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(f'{{"n": {number}}}\n')

    rows = open_rows("**/*.jsonl", folder=tmp_path)

    assert all_of(rows) == [{"n": 1}, {"n": 2}]
    assert list(rows.keys) == ["x/a.jsonl:1", "y/a.jsonl:1"]


def test_parquet_files_of_a_glob_are_read_separately(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", "parquet")

    rows = open_rows(FileSource(type="parquet", path="*.parquet"), folder=tmp_path)

    assert rows.key(0) == "a.parquet:1"
    assert rows.key(9) == "b.parquet:5"
    assert rows.get([9]) == [ROWS[4]]


def test_parquet_files_without_rows_are_skipped(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS), ("b", []), ("c", ROWS)):
        pd.DataFrame(rows, columns=["question", "answer"], dtype="string").to_parquet(tmp_path / f"{name}.parquet")

    rows = open_rows(FileSource(type="parquet", path="*.parquet"), folder=tmp_path)

    assert [rows.key(index) for index in (0, 4, 5)] == ["a.parquet:1", "a.parquet:5", "c.parquet:1"]
    with pytest.raises(DataError, match=r"b\.parquet has no rows"):
        open_rows(tmp_path / "b.parquet", folder=tmp_path)


def test_a_folder_in_the_layout_of_the_hub_is_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", "jsonl")

    rows = open_rows({"type": "hub", "name": "set"}, folder=tmp_path)

    assert all_of(rows) == ROWS
    assert rows.key(1) == "set/train:2"
    assert all_of(open_rows("set", folder=tmp_path)) == ROWS


def test_a_folder_without_the_split_names_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for split in ("test", "validation"):
        (tmp_path / "runs" / f"{split}.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError) as error:
        open_rows(str(tmp_path), folder=tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no split train, only validation, test; write {{type: hub, name: {tmp_path}, split: ...}}; to "
        f"read its files as they are, write {tmp_path}/**/*.jsonl"
    )


def test_a_selection_keeps_keys_and_has_a_different_fingerprint(tmp_path: Path) -> None:
    rows = open_rows(ROWS, folder=tmp_path)

    part = rows.select([4, 1, 2]).select([2, 0])

    assert all_of(part) == [ROWS[2], ROWS[4]]
    assert list(part.keys) == ["dataset:3", "dataset:5"]
    assert part.fingerprint != rows.fingerprint
    assert part.fingerprint == rows.select([4, 1, 2]).select([2, 0]).fingerprint
    assert list(part.iterate()) == [[ROWS[2], ROWS[4]]]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_changed_file_is_read_again_and_has_another_fingerprint(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    before = open_rows(path, folder=tmp_path)
    same = open_rows(path, folder=tmp_path).fingerprint
    stat = path.stat()
    if kind == "parquet":
        with quiet_datasets():
            datasets.Dataset.from_list([*ROWS[:4], {"question": "why 9?", "answer": "because 4"}]).to_parquet(path)
    else:
        path.write_text(path.read_text().replace("why 4?", "why 9?"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    after = open_rows(path, folder=tmp_path)

    assert before.fingerprint == same
    assert after.fingerprint != before.fingerprint
    assert after.get([4])[0]["question"] == "why 9?"
    assert before.get([4])[0]["question"] == "why 4?"


def test_missing_cells_of_a_frame_are_none(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": ["x", None, float("nan")], "b": [1.5, None, 2]}, index=[7, 7, 9])

    assert all_of(open_rows(frame, folder=tmp_path)) == [
        {"a": "x", "b": 1.5},
        {"a": None, "b": None},
        {"a": None, "b": 2.0},
    ]


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"question": "why " * 100, "answer": str(i)}) + "\n" for i in range(20_000))

    tracemalloc.start()
    rows = open_rows("a.jsonl", folder=tmp_path)
    last = rows.get([19_999])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert last[0]["answer"] == "19999"
    assert peak < 20_000 * 100 < (tmp_path / "a.jsonl").stat().st_size / 4


def test_the_verbosity_of_libraries_is_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.parquet", "parquet")
    capfd.readouterr()
    shown = datasets.are_progress_bars_disabled()

    open_rows(path, folder=tmp_path)

    assert datasets.are_progress_bars_disabled() == shown
    assert capfd.readouterr() == ("", "")


def failure(dataset: Any, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_rows(dataset, folder=folder)
    return str(error.value)


def test_a_missing_file_is_reported_with_similar_names(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")

    assert failure("trian.jsonl", tmp_path) == (f"trian.jsonl does not exist in {tmp_path}; did you mean train.jsonl?")
    assert failure("other.csv", tmp_path) == f"other.csv does not exist in {tmp_path}"
    assert failure("no/a.csv", tmp_path) == f"no/a.csv does not exist: there is no folder {tmp_path / 'no'}"
    assert failure("*.csv", tmp_path) == f"no file matches *.csv in {tmp_path}"


def test_an_environment_variable_without_braces_is_explained(tmp_path: Path) -> None:
    hint = "; for the environment variable, write ${DATA}"
    assert failure("$DATA/a.csv", tmp_path) == (
        f"$DATA/a.csv does not exist: there is no folder {tmp_path / '$DATA'}{hint}"
    )
    assert failure("$DATA", tmp_path).endswith(f"with the format as type{hint}")
    assert failure("$DATA.csv", tmp_path) == f"$DATA.csv does not exist in {tmp_path}{hint}"


def test_a_missing_file_with_a_dollar_sign_is_reported_with_similar_names(tmp_path: Path) -> None:
    (tmp_path / "in_$usd.csv").write_text("a\n1\n")

    assert failure("in_$used.csv", tmp_path) == f"in_$used.csv does not exist in {tmp_path}; did you mean in_$usd.csv?"


def test_a_path_that_is_not_utf_8_is_reported(tmp_path: Path) -> None:
    assert failure("\udcff.csv", tmp_path) == r"the path '\udcff.csv' is not UTF-8; rename the file or the folder"


@pytest.mark.parametrize("source", ["long " * 60, "a/" * 2100, {"type": "csv", "path": "long " * 60}])
def test_a_text_instead_of_a_path_is_reported(tmp_path: Path, source: Any) -> None:
    text = source if isinstance(source, str) else source["path"]
    assert failure(source, tmp_path) == (
        f"{text[:57]}... is too long for a path; to use texts that are in no file, pass a list of rows, such as "
        '[{"column": "text"}]'
    )


def test_an_unknown_file_extension_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    message = failure("data.feather", tmp_path)

    assert message.startswith(
        "data.feather: the file extension is not one of a known format; known are arrow, csv, json, jsonl, "
    )
    assert message.endswith("For another ending write {type: csv, path: ...} with the format as type")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "a.jsonl has no rows"),
        ("a.json", b" \n", "a.json has no rows"),
        ("a.csv", b"a,b\n", "a.csv has no rows"),
        ("a.csv", b"a,b,a\n1,2,3\n", "a.csv: the header names 'a' twice; rename one"),
        (
            "a.csv",
            b"sep=;\na;b\n1;2\n3;4\n",
            "a.csv: its first line only tells Excel the delimiter (sep=); remove the line",
        ),
        (
            "a.csv",
            b"text;label\nyes\n",
            (
                "a.csv has a single column, 'text;label'; its delimiter may be ';', but the rows do not have as many "
                "cells as the header; write its delimiter at the source, such as delimiter: ','"
            ),
        ),
        (
            "a.csv",
            b'"a\n1\n',
            "a.csv: the header cannot be read: broken CSV: a quote opens here that is never closed",
        ),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "a.jsonl is UTF-16; write encoding: utf-16 at its source, or"),
        ("a.jsonl", b"[1]\n[2]\n", "a.jsonl has no good row: a.jsonl:1: a row is a JSON object, this is a list"),
        ("a.jsonl", b"x\n" * 2000, "a.jsonl: the first 1,000 rows are broken; not JSON: "),
        ("a.json", b'[{"a": 1}, {"a": 2}', "a.json: the JSON array is not closed after row 2; is the file cut off?"),
        (
            "a.json",
            b'[{"a": 1},\n{"a": x, "b": 1234567890}]',
            "row 2 of the JSON array is broken in line 2: Expecting value",
        ),
        (
            "a.json",
            b'[{"a": 1},\n{"a": 2},\n{"a": "half a te',
            "row 3 of the JSON array is broken in line 3: Unterminated string starting at; is the file cut off?",
        ),
        (
            "a.json",
            b"[\n" + b'{"a": 1},\n' * 200_000 + b'{"a" 2}, {"a": "the rest of the file"}]',
            "a.json: row 200001 of the JSON array is broken in line 200002: Expecting ':' delimiter",
        ),
        (
            "a.json",
            b'{"a": [1, 2], "a": [3, 4]}',
            "a.json: the key 'a' occurs twice in an object; remove or rename one",
        ),
        (
            "a.jsonl",
            b'{"a": 1, "a": 2}\n',
            "a.jsonl has no good row: a.jsonl:1: the key 'a' occurs twice in an object; remove or rename one",
        ),
        (
            "a.csv",
            gzip.compress(b"a,b\n1,2\n", mtime=0),
            "a.csv is compressed with gzip, but its name does not end in .gz; rename it",
        ),
        (
            "a.jsonl",
            bz2.compress(b"{}"),
            "a.jsonl is compressed with bzip2, but its name does not end in .bz2; rename it",
        ),
        ("a.json", lzma.compress(b"[]"), "a.json is compressed with xz, but its name does not end in .xz; rename it"),
        (
            "a.csv",
            b"PK\x03\x04\x14\0",
            "a.csv is not text: it is a zip archive or an Excel file; unpack it, or rename it",
        ),
        ("a.csv", b"PAR1\x15\x04\x15", "a.csv is not text: it is a Parquet file; rename it to .parquet"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0", "a.txt is not text: it is a PNG image"),
        (
            "a.json",
            b'[{"a": "\xff"}]',
            f"a.json is not UTF-8: byte 0xff at position 9; {WRITE_ENCODING}",
        ),
        ("a.json", b"hello", "a.json is neither a JSON array nor an object a line: Expecting value"),
        ("a.json", b"7", "a.json holds a single value; write an array of objects, or an object a line"),
        ("a.csv.gz", b"no gzip at all", "Not a gzipped file"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read as parquet: its end is missing; write or copy it again"),
        ("a.parquet", b"", "a.parquet cannot be read as parquet: it is empty"),
        (
            "a.parquet",
            b"a,b\n1,2\n",
            "a.parquet cannot be read as parquet: it is text that begins with 'a,b 1,2'; name its format at the source",
        ),
        (
            "a.parquet",
            gzip.compress(b"PAR1", mtime=0),
            "a.parquet cannot be read as parquet: it is compressed with gzip; unpack",
        ),
        ("a.parquet", b"\0" * 20, "a.parquet cannot be read as parquet: it has another format"),
        (
            "a.parquet",
            b"PAR1" + b"\1" * 20 + b"PAR1",
            "a.parquet cannot be read as parquet: it is damaged or cut off (",
        ),
        ("a.arrow", b"PAR1\x15\x04\x15PAR1", "a.arrow cannot be read as arrow: it is a Parquet file; rename it to"),
        ("a.arrow", b"ARROW1\0\0", "a.arrow cannot be read as arrow: its end is missing; write or copy it again"),
        ("a.csv", POINTER, "a.csv is a pointer of Git LFS, not the file itself; run git lfs pull"),
        ("a.jsonl", POINTER, "a.jsonl is a pointer of Git LFS, not the file itself; run git lfs pull"),
        ("a.parquet", POINTER, "a.parquet is a pointer of Git LFS, not the file itself; run git lfs pull"),
        (
            "a.json",
            b'[{"a": 1}]\n[{"a": 2}]',
            "a.json: the JSON array ends after row 1, and more follows; write one array",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_reported(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)

    assert expected in failure(name, tmp_path)


@pytest.mark.parametrize(("ending", "is_cut_off"), [("", True), (",}]", False), (', "b', True)])
def test_only_an_array_without_its_end_is_said_to_be_cut_off(ending: str, is_cut_off: bool, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1},\n{"a": 2' + ending)

    message = failure("a.json", tmp_path)

    assert message.startswith("a.json: row 2 of the JSON array is broken in line 2: ")
    assert message.endswith("; is the file cut off?") == is_cut_off


def test_an_empty_path_is_no_dataset(tmp_path: Path) -> None:
    assert failure("", tmp_path).startswith("the path of the data is empty; write a path")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2, "b": {"c": 1, "c": 2}}\n{"a": 3}\n'),
        ("a.json", b'[{"a": 1}, {"a": 2, "b": {"c": 1, "c": 2}}, {"a": 3}]'),
    ],
)
def test_a_row_with_a_repeated_key_is_a_bad_row(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    rows = open_rows(name, folder=tmp_path)
    assert [row["a"] for row in all_of(rows)] == [1, 3]
    assert [row.reason for row in rows.bad] == ["the key 'c' occurs twice in an object; remove or rename one"]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ([], "dataset has no rows"),
        ([{"a": 1}, [2]], "row 2 is a list, not a dict of column to value"),
        ({"a": [1, 2], "b": [1]}, "the columns have different numbers of rows: a has 2, b has 1"),
        ({"a": "text"}, "column a is not a list but a str; write a dict of lists"),
        (7, "a int is not a dataset; pass a path, a glob, a Hub name, a pandas frame, "),
        (datasets.DatasetDict(), "a DatasetDict holds several datasets; pass one of them, such as dataset['test']"),
        ({"type": "csv", "pth": "x"}, "the source {'type': 'csv', 'pth': 'x'} is wrong: csv.path: Field required"),
    ],
)
def test_unsupported_objects_in_memory_are_refused(dataset: Any, expected: str, tmp_path: Path) -> None:
    assert expected in failure(dataset, tmp_path)


def test_an_unreachable_hub_dataset_is_reported(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path\nfrom partita.data.sources.sources import open_rows\n"
        "try:\n    open_rows('someone/nothing', folder=Path())\nexcept Exception as error:\n    print(repr(error))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    message = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert message.stdout.startswith('DataError("someone/nothing cannot be read: ')


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.csv").mkdir()

    assert failure("set.csv", tmp_path) == "set.csv is a folder; write a glob such as set.csv/*.jsonl"


def test_odd_keys_in_cells_have_a_stable_fingerprint_too(tmp_path: Path) -> None:
    first, same, other = (open_rows([{"a": {(1, 2): value}}], folder=tmp_path).fingerprint for value in "xxy")

    assert first == same != other


def test_a_frame_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    frame = pd.DataFrame([[1, 2, 3]], columns=["q", "a", "a"])
    with pytest.raises(DataError, match="the data frame has two columns 'a'; rename or drop one of them"):
        open_rows(frame, folder=tmp_path)
    with pytest.raises(DataError, match="the table has two columns named 'a'; rename one"):
        open_rows(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), folder=tmp_path)
