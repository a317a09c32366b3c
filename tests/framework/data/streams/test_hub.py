import json
from pathlib import Path

import datasets
import pytest

from partita.data.formats.datasets_loading import quiet_datasets
from partita.data.run_data import open_stream
from partita.data.sources.sources import open_rows
from partita.data.streams.base import Stream
from partita.data.streams.files import FileStream
from partita.data.streams.hub import DatasetsStream
from partita_schema.errors import DataError
from partita_schema.sections.sources import HubSource

ROWS = [{"question": f"why {i}?", "count": i} for i in range(1300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three datasets in the layout of the Hub."""
    with quiet_datasets():
        for kind in ("parquet", "csv", "json"):
            (tmp_path / kind).mkdir()
            for part in range(2):
                table = datasets.Dataset.from_list(ROWS[part::2])
                getattr(table, f"to_{kind}")(tmp_path / kind / f"train-{part}.{'jsonl' if kind == 'json' else kind}")
    return tmp_path


def stream_of(folder: Path, name: str, shards: int = 1, split: str = "train") -> Stream:
    return open_stream(HubSource(type="hub", name=name, split=split), folder=folder, least_shards=shards)


def check_resume(stream: Stream, every: int) -> None:
    for shard in range(len(stream.shards)):
        whole = list(stream.read(shard, None))
        for index, (_, position) in list(enumerate(whole, start=1))[::every]:
            assert list(stream.read(shard, json.loads(json.dumps(position)))) == whole[index:]


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize(("name", "kind"), [("parquet", FileStream), ("json", FileStream), ("csv", DatasetsStream)])
def test_a_folder_in_the_layout_of_the_hub_gives_its_rows_once(
    name: str, kind: type, shards: int, folder: Path
) -> None:
    stream = stream_of(folder, name, shards)
    rows = [row for shard in range(len(stream.shards)) for row, _ in stream.read(shard, None)]
    results = [json.loads(row.row) if isinstance(row.row, bytes) else row.row for row in rows]
    by_index = open_rows(HubSource(type="hub", name=name), folder=folder)

    assert isinstance(stream, kind)
    assert stream.name == f"{name}/train"
    assert len(stream.shards) >= shards
    assert len({(stream.shards[row.shard], row.number) for row in rows}) == 1300
    assert sorted(row["count"] for row in results) == list(range(1300))
    assert sorted(map(repr, results)) == sorted(map(repr, by_index.get(range(1300))))
    check_resume(stream, 150)


def test_a_missing_dataset_is_reported(folder: Path) -> None:
    with pytest.raises(DataError, match=r"parquet cannot be read: ValueError: Bad split: dev"):
        stream_of(folder, "parquet", split="dev")
    (folder / "none").mkdir()
    with pytest.raises(DataError, match="none cannot be read: "):
        stream_of(folder, "none")
