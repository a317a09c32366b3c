import bz2
import gzip
import io
import json
import lzma
import sys
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from fsspec import AbstractFileSystem
from hypothesis import example, given
from hypothesis import strategies as st

from partita.data.batching.policies import Fixed
from partita.data.formats import FORMATS
from partita.data.formats.base import DEFAULT_SIZES, MAX_ROW_BYTES, FileSizes, StreamRow
from partita.data.formats.json import json_record
from partita.data.formats.signatures import UTF16_MARKS
from partita.data.run_data import open_stream, training_streams
from partita.data.sources.sources import find_files, open_rows
from partita.data.streams import files
from partita.data.streams.base import Stream
from partita.data.streams.files import FileStream
from partita.data.streams.interleaved_reader import InterleavedReader
from partita.data.streams.shard_group import ShardPlan
from partita.data.streams.sharding import unevenness
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sections.sources import FileSource

from ....properties import examples
from ..formats.text_readers import READERS

ROWS = [{"question": f"why {i}?" + "é" * (i % 3), "answer": f"because\n{i}"} for i in range(23)]
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


CUT_ALL = FileSizes(small_bytes=0)
"""Limits with which small files are split by bytes as large ones are."""


def stream_of(folder: Path, path: str, kind: str, shards: int = 1, sizes: FileSizes = DEFAULT_SIZES) -> Stream:
    return FileStream(kind, find_files(path, folder=folder), name=path, least_shards=shards, file_sizes=sizes)


def read(stream: Stream) -> list[StreamRow]:
    return [row for shard in range(len(stream.shards)) for row, _ in stream.read(shard, None)]


def content(row: StreamRow) -> Any:
    if row.reason:
        return row.reason, row.raw
    return json.loads(row.row) if isinstance(row.row, bytes) else row.row


def keyed(stream: Stream) -> dict[str, Any]:
    rows = {f"{stream.shards[row.shard]}:{row.number}": content(row) for row in read(stream)}
    assert len(rows) == len(read(stream))
    return rows


def indexed(folder: Path, path: str, kind: str) -> dict[str, Any]:
    rows = open_rows(FileSource(type=kind, path=path), folder=folder)
    results: dict[str, Any] = dict(zip(rows.keys, rows.get(range(len(rows))), strict=True))
    return results | {bad.key: (bad.reason, bad.raw) for bad in rows.bad}


def check_resume(stream: Stream) -> None:
    """Check that reading from every position of every shard yields the same rows as the first pass."""
    for shard in range(len(stream.shards)):
        whole = list(stream.read(shard, None))
        for index, (_, position) in enumerate(whole, start=1):
            kept = json.loads(json.dumps(position))
            assert list(stream.read(shard, kept)) == whole[index:]


def write(folder: Path, kind: str, name: str = "rows") -> str:
    path = folder / f"{name}.{kind}"
    table = pyarrow.Table.from_pylist(ROWS)
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else "\t"
        cells = "".join(f'"{row["question"]}"{mark}"{row["answer"]}"\r\n' for row in ROWS)
        path.write_bytes(f"question{mark}answer\r\n{cells}".encode())
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "txt":
        path.write_text("".join(f"{row['question']}\n" for row in ROWS))
    elif kind == "parlai":
        path.write_text("".join(f"text:{row['question']}\tlabels:ah\tepisode_done:True\n" for row in ROWS))
    elif kind == "xlsx":
        openpyxl = pytest.importorskip("openpyxl", reason="needs openpyxl: pip install 'partita[excel]'")
        workbook = openpyxl.Workbook()
        for cells in (list(ROWS[0]), *(list(row.values()) for row in ROWS)):
            workbook.active.append(cells)
        workbook.save(path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=5)
    elif kind == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path.name


KINDS = ["jsonl", "txt", "csv", "tsv", "json", "parlai", "xlsx", "parquet", "arrow"]


def test_every_format_is_tested_here() -> None:
    assert set(KINDS) == set(FORMATS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_file_has_the_rows_and_keys_of_reading_by_index(kind: str, tmp_path: Path) -> None:
    name = write(tmp_path, kind)
    stream = stream_of(tmp_path, name, kind)

    assert stream.shards == [name]
    assert list(keyed(stream).items()) == list(indexed(tmp_path, name, kind).items())
    assert len(keyed(stream)) == 23


@pytest.mark.parametrize(
    ("kind", "shards"),
    # A workbook is opened again for each position, which takes long.
    [(kind, shards) for kind in KINDS for shards in (1, 2, 5, 40) if kind != "xlsx" or shards == 2],
)
def test_each_row_is_in_one_shard_and_every_position_can_be_resumed(kind: str, shards: int, tmp_path: Path) -> None:
    name = write(tmp_path, kind)
    stream = stream_of(tmp_path, name, kind, shards)

    assert len(stream.shards) >= shards
    assert keyed(stream) == indexed(tmp_path, name, kind)
    check_resume(stream)


@pytest.mark.parametrize("shards", [1, 2, 5, 40])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_file_split_by_bytes_has_each_row_in_one_part(kind: str, shards: int, tmp_path: Path) -> None:
    name = write(tmp_path, kind)
    stream = stream_of(tmp_path, name, kind, shards, CUT_ALL)
    by_index = indexed(tmp_path, name, kind)

    assert len(stream.shards) >= shards
    assert sorted(map(repr, keyed(stream).values())) == sorted(map(repr, by_index.values()))
    check_resume(stream)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_compressed_files_are_distributed(kind: str, ending: str, tmp_path: Path) -> None:
    name = write(tmp_path, kind)
    whole = indexed(tmp_path, name, kind)
    (tmp_path / f"{name}{ending}").write_bytes(COMPRESS[ending]((tmp_path / name).read_bytes()))
    stream = stream_of(tmp_path, f"{name}{ending}", kind, 3)

    assert list(stream.shards) == [f"{name}{ending}"] * 3
    assert {key.replace(ending, ""): row for key, row in keyed(stream).items()} == whole
    check_resume(stream)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_files_with_a_url_are_read_like_local_ones(kind: str, tmp_path: Path) -> None:
    name = write(tmp_path, kind)
    fsspec.filesystem("memory").pipe(f"/streams/{name}", (tmp_path / name).read_bytes())
    here, there = (stream_of(tmp_path, path, kind, 3) for path in (name, f"memory://streams/{name}"))

    assert keyed(here) == keyed(there)
    check_resume(there)


def test_an_arrow_file_with_an_index_is_read_too(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    stream = stream_of(tmp_path, "a.arrow", "arrow", 2)

    assert sorted(keyed(stream)) == sorted(f"a.arrow:{number}" for number in range(1, 24))
    check_resume(stream)


def test_a_glob_of_enough_files_splits_only_a_much_larger_one(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_bytes(b'{"a": 1}\n' * (400 if number == 3 else 10 if number else 20))
    stream = stream_of(tmp_path, "*.jsonl", "jsonl", 4, CUT_ALL)

    assert [label for label in stream.shards if "@" not in label] == [f"{n}.jsonl" for n in (0, 1, 2, 4, 5, 6, 7)]
    assert sum("3.jsonl@" in label for label in stream.shards) == 4
    assert len(keyed(stream)) == 480


def rows_of_groups(stream: Stream, num_groups: int) -> list[int]:
    readers = [
        InterleavedReader([stream], weights=[1], stop="all", group=group, num_groups=num_groups, seed=1, epoch=0)
        for group in range(num_groups)
    ]
    return [len(reader.take(10**6)) for reader in readers]


@pytest.mark.parametrize(("count", "num_groups"), [(5, 4), (9, 8), (3, 7), (17, 16), (8, 4)])
@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "arrow", "csv", "json", "jsonl.gz"])
def test_shard_groups_have_equal_rows_for_any_number_of_files(
    kind: str, count: int, num_groups: int, tmp_path: Path
) -> None:
    form = kind.partition(".")[0]
    for number in range(count):
        name = write(tmp_path, form, f"{number:02}")
        if kind.endswith(".gz"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes(), mtime=0))
    rows = rows_of_groups(stream_of(tmp_path, f"*.{kind}", form, num_groups, FileSizes(small_bytes=1)), num_groups)

    assert sum(rows) == 23 * count
    assert max(rows) <= 1.05 * sum(rows) / num_groups + 3


@examples(40)
@example([1, 1, 2, 3], 2)  # after splitting only the largest file, the groups would have 150 and 200 bytes
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any), st.integers(1, 9))
def test_splittable_files_of_any_sizes_give_even_shard_groups(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_groups: int
) -> None:
    folder = tmp_path_factory.mktemp("sizes")
    for number, size in enumerate(sizes):
        (folder / f"{number:02}.txt").write_bytes(b"line\n" * 10 * size)
    stream = stream_of(folder, "*.txt", "txt", num_groups, CUT_ALL)

    assert len(stream.shards) >= num_groups
    assert sum(stream.sizes) == pytest.approx(50 * sum(sizes))
    assert unevenness(stream.sizes, num_groups) <= 1.06
    rows = rows_of_groups(stream, num_groups)
    assert sum(rows) == 10 * sum(sizes)
    assert max(rows) <= 1.25 * sum(rows) / num_groups + 12


def test_splits_depend_only_on_the_files_and_the_shard_groups(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, "jsonl", str(number))
    one, again = (stream_of(tmp_path, "*.jsonl", "jsonl", 4, CUT_ALL) for _ in range(2))

    assert one.shards == again.shards
    assert one.sizes == again.sizes
    assert sum("@" in label for label in one.shards) == 4


def test_compressed_files_of_uneven_sizes_are_distributed_by_size_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        lines_of_file = [json.dumps({"a": f"{number}{i * 7919 % 104729}"}) for i in range(4000 if number == 2 else 40)]
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines_of_file).encode(), mtime=0))
    stream = stream_of(tmp_path, "*.jsonl.gz", "jsonl", 3, CUT_ALL)

    assert list(stream.shards) == [f"{number}.jsonl.gz" for number in range(4)]
    assert sorted(rows_of_groups(stream, 3)) == [40, 80, 4000]
    [message] = caplog.messages
    uneven = f"{unevenness(stream.sizes, 3):.1f}"
    assert message == (
        f"*.jsonl.gz: the longest of 3 shard groups has {uneven} times the bytes of the mean, so steps at the end of "
        "an epoch hold fewer rows; write more files of similar size, or uncompressed JSON lines or Parquet, which can "
        "be split"
    )


def test_a_row_group_is_shared_by_shard_groups(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    stream = stream_of(tmp_path, "a.parquet", "parquet", 4)

    assert [[row.number for row, _ in stream.read(shard, None)] for shard in range(4)] == [
        [*range(1, 6)],
        [*range(6, 12)],
        [*range(12, 18)],
        [*range(18, 24)],
    ]
    check_resume(stream)


def test_large_files_are_split_finer_than_requested(tmp_path: Path) -> None:
    write(tmp_path, "jsonl")
    stream = stream_of(tmp_path, "rows.jsonl", "jsonl", 2, FileSizes(small_bytes=0, fine_bytes=100))

    assert len(stream.shards) == 8


lines_of_text = st.lists(
    st.one_of(
        st.sampled_from([b"", b"  ", b'{"a": 1}', b"not json", b"\xff\xfe", b"\xc3", b'"', b'a,"b', b"\r", b"x,y"]),
        st.text(max_size=12).map(lambda text: text.encode("utf-8", "replace")),
    ),
    max_size=12,
)


@examples(150)
@given(
    st.sampled_from(["jsonl", "txt", "csv"]),
    lines_of_text,
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
    st.sampled_from([1, 2, 7, 1 << 18]),
    st.sampled_from([0, DEFAULT_SIZES.small_bytes]),
)
def test_any_bytes_are_read_exactly_once_from_any_position(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    content_lines: list[bytes],
    end: bytes,
    bom: bool,
    closed: bool,
    shards: int,
    block: int,
    small: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    data = (b"\xef\xbb\xbf" if bom else b"") + b"head,er" * (kind == "csv") + end + end.join(content_lines)
    if data.startswith(UTF16_MARKS):
        return
    (folder / f"a.{kind}").write_bytes(data + end * closed)
    sizes = FileSizes(small_bytes=small, block_bytes=block)
    whole, cut = (stream_of(folder, f"a.{kind}", kind, number, sizes) for number in (1, shards))
    assert [number_and_text(row) for row in read(whole)] == by_reader(folder / f"a.{kind}", kind)
    assert sorted(repr(number_and_text(row)[1:]) for row in read(cut)) == sorted(
        repr(number_and_text(row)[1:]) for row in read(whole)
    )
    check_resume(whole)
    check_resume(cut)


def number_and_text(row: StreamRow) -> tuple[int, Any]:
    """Return number and content, once a worker has parsed the row."""
    if isinstance(row.row, bytes) and not row.reason:
        record = json_record(row.row, row.number)
        return row.number, (record.reason, record.raw) if record.reason else json.loads(row.row)
    return row.number, (row.reason, row.raw.rstrip("\r\n")) if row.reason else content(row)


def by_reader(path: Path, kind: str) -> list[tuple[int, Any]]:
    """Return the rows of the reader of whole files."""
    with path.open("rb") as stream:
        rows = list(READERS[kind](stream, path.name, MAX_ROW_BYTES))
    return [(row.number, (row.reason, row.raw.rstrip("\r\n")) if row.reason else json.loads(row.row)) for row in rows]


def test_rows_of_a_part_have_their_byte_offset_as_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a": 2}\n')

    assert list(keyed(stream_of(tmp_path, "a.jsonl", "jsonl", 2, CUT_ALL))) == ["a.jsonl@0:0", "a.jsonl@9:10"]


def test_a_line_that_is_too_long_is_a_bad_row_and_not_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"a": 1}\n' + b"x" * 3 * DEFAULT_SIZES.block_bytes + b'\n{"a": 2}\n' + b"y" * 5000
    )
    source = FileSource(type="jsonl", path="a.jsonl")
    stream = open_stream(source, folder=tmp_path, least_shards=1, max_row_bytes=1000)

    reason = "the line is longer than 1,000 bytes; write a larger data.max_row_bytes if it is meant"
    assert [(row.number, row.reason) for row in read(stream)] == [(1, ""), (2, reason), (3, ""), (4, reason)]
    check_resume(stream)


def test_a_stream_of_csv_whose_delimiter_is_unclear_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text;label\nyes\n")

    with pytest.raises(DataError, match=r"^a\.csv has a single column, 'text;label'; its delimiter may be ';', but "):
        read(stream_of(tmp_path, "a.csv", "csv", 1))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_tables_in_another_dialect_are_streamed_as_they_are_read_by_index(
    delimiter: str, encoding: str, shards: int, tmp_path: Path
) -> None:
    cells = "".join(f'{row["question"]}{delimiter}"{row["answer"]}"\r\n' for row in ROWS)
    (tmp_path / "a.csv").write_bytes(f"question{delimiter}answer\r\n{cells}".encode(encoding))
    stream = stream_of(tmp_path, "a.csv", "csv", shards)

    assert keyed(stream) == indexed(tmp_path, "a.csv", "csv")
    assert sorted(row["question"] for row in keyed(stream).values()) == sorted(row["question"] for row in ROWS)
    check_resume(stream)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "txt", "parlai"])
@pytest.mark.parametrize("encoding", ["utf-16", "shift_jis"])
def test_a_configured_encoding_is_streamed_as_it_is_read_by_index(kind: str, encoding: str, tmp_path: Path) -> None:
    text = (tmp_path / write(tmp_path, kind)).read_bytes().decode()
    text = json.dumps(json.loads(text), ensure_ascii=False) if kind == "json" else text
    text = text.replace("\u00e9", "\u30a2")
    (tmp_path / f"rows.{kind}").write_bytes(text.encode(encoding))
    source = FileSource(type=kind, path=f"rows.{kind}", encoding=encoding)
    rows = open_rows(source, folder=tmp_path)
    stream = open_stream(source, folder=tmp_path, least_shards=2)

    assert sorted(map(json.dumps, keyed(stream).values())) == sorted(map(json.dumps, rows.get(range(len(rows)))))
    assert sum("\u30a2" in str(row) for row in keyed(stream).values()) == 15
    check_resume(stream)


def test_bad_rows_of_csv_are_reported_and_reading_continues(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n3\n"4,5\n6,7\n\xff,1\n')
    stream = stream_of(tmp_path, "a.csv", "csv", 2)

    assert keyed(stream) == indexed(tmp_path, "a.csv", "csv")
    assert {row.number: row.reason for row in read(stream) if row.reason} == {
        3: "1 cell, the header has 2",
        4: "broken CSV: a quote opens here that is never closed",
        6: "not UTF-8; write its encoding at the source, such as encoding: cp1252, or save the file as UTF-8",
    }


@pytest.mark.parametrize("kind", ["jsonl", "txt", "json"])
@pytest.mark.parametrize("shards", [1, 3])
def test_utf_16_is_refused(kind: str, shards: int, tmp_path: Path) -> None:
    (tmp_path / f"a.{kind}").write_bytes("a\nb\n".encode("utf-16"))

    with pytest.raises(DataError, match=rf"a.{kind}(@0)? is UTF-16; write encoding: utf-16 at its source, or "):
        read(stream_of(tmp_path, f"a.{kind}", kind, shards, CUT_ALL))


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-20])
    (tmp_path / "no.parquet").write_bytes(b"text")
    (tmp_path / "no.arrow").write_bytes(b"text")

    with pytest.raises(DataError, match=r"empty.jsonl has no rows"):
        stream_of(tmp_path, "empty.jsonl", "jsonl", 4)
    with pytest.raises(DataError, match=r"gone.jsonl does not exist in .*"):
        stream_of(tmp_path, "gone.jsonl", "jsonl")
    with pytest.raises(DataError, match="no file matches gone"):
        stream_of(tmp_path, "gone*.jsonl", "jsonl")
    with pytest.raises(DataError, match=r"torn.jsonl.gz cannot be read: .*end"):
        read(stream_of(tmp_path, "torn.jsonl.gz", "jsonl"))
    for kind in ("parquet", "arrow"):
        for shards in (1, 3):
            with pytest.raises(DataError, match=f"no.{kind} cannot be read as {kind}: "):
                read(stream_of(tmp_path, f"no.{kind}", kind, shards))


def test_a_file_removed_before_it_is_read_is_reported(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, write(tmp_path, "jsonl"), "jsonl")
    (tmp_path / "rows.jsonl").unlink()

    with pytest.raises(DataError, match=r"rows.jsonl cannot be read: .*No such file"):
        read(stream)


def test_empty_files_among_others_and_headers_alone_give_no_rows(tmp_path: Path) -> None:
    for kind, nothing in (("jsonl", b""), ("csv", b"a,b\n"), ("json", b"")):
        (tmp_path / f"1.{kind}").write_bytes(nothing)
        write(tmp_path, kind, "2")
        assert len(keyed(stream_of(tmp_path, f"*.{kind}", kind, 3))) == 23


def test_the_fingerprint_changes_with_names_sizes_and_last_bytes(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return stream_of(tmp_path, "*.jsonl", "jsonl", 2).fingerprint

    write(tmp_path, "jsonl")
    first = fingerprint()
    assert stream_of(tmp_path, "*.jsonl", "jsonl", 5).fingerprint == first
    (tmp_path / "rows.jsonl").write_bytes((tmp_path / "rows.jsonl").read_bytes().replace(b"why", b"who"))
    second = fingerprint()
    (tmp_path / "rows.jsonl").rename(tmp_path / "more.jsonl")

    assert len({first, second, fingerprint()}) == 3


def test_the_fingerprint_covers_small_files_completely(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    prints = []
    for size in (100_000, files.KNOWN, files.KNOWN + 1000):
        for middle in (b"a", b"b"):
            path.write_bytes(b"x" * 50_000 + middle + b"x" * (size - 50_001))
            prints.append(stream_of(tmp_path, "a.txt", "txt").fingerprint)

    assert [one == other for one, other in zip(prints[::2], prints[1::2], strict=True)] == [False, False, True]


class Forward(io.BytesIO):
    """A file as fsspec opens it on a web server without range requests: `seekable` is true, but `seek` fails."""

    def seek(self, offset: int, whence: int = 0) -> int:
        raise ValueError("Cannot seek streaming HTTP file")


class ForwardSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec ships no types
    """A file system whose files can only be read from the beginning."""

    protocol = "forward"
    held: ClassVar[dict[str, bytes]] = {}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.held[path]), "type": "file"}

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Forward:
        return Forward(self.held[path])


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_files_of_a_server_without_range_requests_are_split_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = FileSizes(small_bytes=0, block_bytes=64)
    fsspec.register_implementation("forward", ForwardSystem, clobber=True)
    name = write(tmp_path, kind)
    monkeypatch.setitem(ForwardSystem.held, f"web/{name}", (tmp_path / name).read_bytes())
    here, there = (stream_of(tmp_path, path, kind, 3, sizes) for path in (name, f"forward://web/{name}"))

    assert len(there.shards) == 3
    assert keyed(here) == keyed(there)
    check_resume(there)


def test_a_missing_library_for_urls_is_reported_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r'a.jsonl cannot be opened: .*"aiohttp" to be installed; to read from the web, pip install aiohttp$'
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for protocol in ("http", "https"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)

    with pytest.raises(DataError, match=message):
        stream_of(tmp_path, "https://example.org/a.jsonl", "jsonl")
    with pytest.raises(DataError, match=message):
        FileStream("jsonl", ["https://example.org/a.jsonl"], name="a", least_shards=1)


@pytest.mark.long
def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    row = json.dumps({"text": "x" * 480}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(row * 100_000)
    reader = InterleavedReader(
        [stream_of(tmp_path, "a.jsonl", "jsonl", 4)], weights=[1], stop="all", group=0, num_groups=1, seed=1, epoch=0
    )
    reader.take(1000)
    tracemalloc.start()
    seen = 1000
    while rows := len(reader.take(1000)):
        seen += rows
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert seen == 100_000
    assert peak < 8 << 20


def plan_of(data: dict[str, Any], *, folder: Path) -> ShardPlan:
    """Return the plan of the streams of a config with this section `data`."""
    config = Config.model_validate(
        {
            "base_model": "base",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {"type": "finetune", "max_steps": 1},
            "data": data,
        }
    )
    streams = training_streams(config, folder=folder)
    assert streams is not None
    return streams.plan(Fixed(4), num_groups=2)


def test_a_stream_is_the_same_by_every_path_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", "csv")
    paths = ("a/rows.csv", "./a/../a/rows.csv", str(tmp_path / "a" / "rows.csv"))
    plans = [plan_of({"source": {"type": "csv", "path": path, "streaming": True}}, folder=tmp_path) for path in paths]
    assert plans[0].fingerprint_inputs.keys() == {"stream"}
    assert plans[0].fingerprint_inputs == plans[1].fingerprint_inputs == plans[2].fingerprint_inputs


def test_labels_of_a_mix_start_with_the_names_of_its_sources(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "csv")
    mix = [
        {"source": {"type": "csv", "path": f"{name}/rows.csv", "streaming": True}, "name": name} for name in ("a", "b")
    ]
    plan = plan_of({"mix": mix}, folder=tmp_path)
    rows = [row for group in range(2) for row in plan.reader(group, epoch=0).take(1000)]

    assert [stream.name for stream in plan.streams] == ["a", "b"]
    assert set(plan.keys(rows)) == {f"{name}/rows.csv:{2 * number}" for name in ("a", "b") for number in range(1, 24)}
