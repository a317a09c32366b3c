import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.data.run_data import open_stream
from partita.data.sources.sources import open_rows
from partita.data.streams.base import Stream
from partita.data.streams.interleaved_reader import InterleavedReader
from partita_schema.errors import ConfigError, DataError
from partita_schema.sections.sources import CustomSource

SOURCES = '''
class Squares:
    """Numbers without end; any of them is near."""

    shards = 2

    def __init__(self, first=0):
        self.first = first

    def read(self, shard, start):
        number = self.first + shard if start is None else start
        while True:
            yield {"prompt": f"{number} squared", "answer": str(number**2)}, number + self.shards
            number += self.shards


class Lines:
    def __init__(self, count):
        self.count = count

    def rows(self):
        return ({"number": number} for number in range(self.count))


class Items(list):
    def __init__(self, count):
        super().__init__({"number": number} for number in range(count))


class Odd:
    def rows(self):
        return [{"number": 1}, "two"]


class Wrong:
    def __init__(self, item):
        self.item = item

    def read(self, shard, start):
        yield self.item


class Unsharded(Wrong):
    shards = 0

    def __init__(self):
        pass


class Nothing:
    pass


class Once:
    def __init__(self):
        self.left = iter([{"number": 1}, {"number": 2}])

    def __iter__(self):
        return self.left


class OwnIterator:
    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        self.number += 1
        return {"number": self.number}


class OnceInRows:
    def __init__(self):
        self.left = iter([{"number": number} for number in range(6)])

    def rows(self):
        return self.left


class Text:
    def rows(self):
        return "text"


class Frame:
    def rows(self):
        import pandas as pd

        return pd.DataFrame({"number": [1, 2]})


class Gone:
    def __init__(self, late):
        self.late = late

    def rows(self):
        if not self.late:
            raise ValueError("the database is gone")
        return self.rows_until_it_is_gone()

    def rows_until_it_is_gone(self):
        yield {"number": 1}
        raise ValueError("the database is gone")
'''


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    name = f"sources_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SOURCES)
    yield tmp_path
    sys.modules.pop(name, None)


def stream_of(folder: Path, name: str, *, shards: int = 1, **options: Any) -> Stream:
    module = next(folder.glob("sources_*.py")).stem
    source = CustomSource(type="custom", target=f"{module}:{name}", options=options, streaming=True)
    return open_stream(source, folder=folder, least_shards=shards)


def group(stream: Stream, state: Any = None) -> InterleavedReader:
    return InterleavedReader([stream], weights=[1], stop="all", group=0, num_groups=1, seed=1, epoch=0, state=state)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_an_endless_source_resumes_anywhere(shards: int, folder: Path) -> None:
    stream = stream_of(folder, "Squares", shards=shards, first=10)
    whole = group(stream).take(500)
    numbers = sorted(int(row.row["prompt"].split()[0]) for _, row in whole if isinstance(row.row, dict))

    assert len(stream.shards) >= shards
    assert len(set(numbers)) == 500
    for taken in (0, 1, 7, 250, 499):
        first = group(stream)
        first.take(taken)
        state = json.loads(json.dumps(first.state()))
        assert group(stream, state).take(500 - taken) == whole[taken:]


@pytest.mark.parametrize("name", ["Lines", "Items"])
@pytest.mark.parametrize("shards", [1, 3])
def test_rows_of_a_class_are_split_into_shard_groups_and_resume_anywhere(name: str, shards: int, folder: Path) -> None:
    stream = stream_of(folder, name, shards=shards, count=10)
    results = [list(stream.read(shard, None)) for shard in range(shards)]

    assert sorted(row.row["number"] for part in results for row, _ in part if isinstance(row.row, dict)) == list(
        range(10)
    )
    assert sorted(f"{stream.shards[row.shard]}:{row.number}" for part in results for row, _ in part) == sorted(
        f"{name}:{number}" for number in range(1, 11)
    )
    for shard, part in enumerate(results):
        for index, (_, position) in enumerate(part, start=1):
            assert list(stream.read(shard, json.loads(json.dumps(position)))) == part[index:]


def test_an_invalid_row_is_a_bad_row(folder: Path) -> None:
    rows = [row for row, _ in stream_of(folder, "Odd").read(0, None)]

    assert [row.reason for row in rows] == ["", "a row is a dict of column to value, this is a str"]
    assert rows[1].raw == "'two'"


def test_the_fingerprint_changes_with_the_options(folder: Path) -> None:
    prints = {
        stream_of(folder, "Squares", shards=shards, first=first).fingerprint for first in (1, 2) for shards in (1, 2)
    }

    assert len(prints) == 2


def test_the_fingerprint_changes_with_the_number_of_shards(folder: Path) -> None:
    module = next(folder.glob("sources_*.py"))
    few = stream_of(folder, "Squares").fingerprint
    sys.modules[module.stem].Squares.shards = 3

    assert stream_of(folder, "Squares").fingerprint != few
    assert stream_of(folder, "Squares", shards=6).fingerprint == stream_of(folder, "Squares", shards=1).fingerprint


@pytest.mark.parametrize("name", ["Once", "OwnIterator"])
def test_a_class_with_one_iterator_for_all_shard_groups_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(
        DataError,
        match=rf"sources_\d+:{name}.__iter__ gives the same iterator again, whose rows can be read only once; "
        "return a new iterator each time, beginning at the first row",
    ):
        stream_of(folder, name, shards=2)


def test_one_iterator_for_all_shard_groups_is_refused_when_the_second_group_starts(folder: Path) -> None:
    stream = stream_of(folder, "OnceInRows", shards=2)

    assert next(iter(stream.read(0, None)))[0].row == {"number": 0}
    with pytest.raises(DataError, match=r"OnceInRows.rows gives the same iterator again, .*; return a new iterator ea"):
        next(iter(stream.read(1, None)))


def test_errors_of_a_class_are_reported(folder: Path) -> None:
    with pytest.raises(DataError, match=r"sources_\d+:Nothing gives no rows; write a method rows\(\) that returns"):
        stream_of(folder, "Nothing")
    with pytest.raises(DataError, match=r"Text.rows gave a str; return an iterable of dicts"):
        list(stream_of(folder, "Text").read(0, None))
    with pytest.raises(DataError, match=r"Squares cannot be created with options .*'last': 1.*unexpected keyword"):
        stream_of(folder, "Squares", last=1)
    with pytest.raises(DataError, match=r"Unsharded.shards is 0; write the number of shards, at least 1"):
        stream_of(folder, "Unsharded")
    with pytest.raises(DataError, match=r"Wrong.read gave a dict; yield \(row, position\) for each row"):
        list(stream_of(folder, "Wrong", item={"a": 1}).read(0, None))
    with pytest.raises(DataError, match=r"Wrong.read gave the position 'there'; write a whole number, or a list"):
        list(stream_of(folder, "Wrong", item=({"a": 1}, "there")).read(0, None))
    with pytest.raises(ConfigError, match=r"has no class Squars; did you mean Squares"):
        stream_of(folder, "Squars")


def test_a_frame_is_not_streamed(folder: Path) -> None:
    with pytest.raises(DataError, match=r"Frame\.rows gave a pandas frame, which is not streamed; leave out streaming"):
        group(stream_of(folder, "Frame")).take(1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_exception_of_a_class_is_an_error_with_its_name(folder: Path, late: bool, streaming: bool) -> None:
    module = next(folder.glob("sources_*.py")).stem
    source = {"type": "custom", "target": f"{module}:Gone", "options": {"late": late}}

    def read() -> Any:
        if streaming:
            return group(stream_of(folder, "Gone", late=late)).take(2)
        return open_rows(source, folder=folder)

    with pytest.raises(DataError) as caught:
        read()
    where = f"{module}.py, line {103 if late else 98}"
    assert str(caught.value) == f"{module}:Gone raised ValueError: the database is gone ({where})"
    assert isinstance(caught.value.__cause__, ValueError)
