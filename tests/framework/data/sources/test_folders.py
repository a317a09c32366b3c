"""Tests of folders that `save_to_disk` of `datasets` has written, and of errors about other folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from partita.data.formats.datasets_loading import quiet_datasets
from partita.data.run_data import open_run_data, open_stream
from partita.data.sources.sources import open_rows
from partita.data.splits import open_splits
from partita_schema.errors import DataError
from partita_schema.sections.sources import HubSource

ROWS = [{"question": f"why {i}?", "answer": f"because {i}"} for i in range(6)]


def save(folder: Path, **splits: list[dict[str, Any]]) -> None:
    with quiet_datasets():
        parts = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        datasets.DatasetDict(parts).save_to_disk(folder)


def leave_cached_files(folder: Path) -> None:
    """Leave the files of `map` and `filter` in a folder of splits, one of them with other columns."""
    with quiet_datasets():
        saved = datasets.load_from_disk(folder)
        saved.filter(lambda row: row["answer"] != "because 0")
        saved.map(lambda row: {"words": row["question"].split()})
    assert len(list(folder.glob("train/cache-*.arrow"))) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a saved dataset with splits (`parts`), and one without (`whole`)."""
    save(tmp_path / "parts", train=ROWS[:4], validation=ROWS[4:5], test=ROWS[5:])
    leave_cached_files(tmp_path / "parts")
    with quiet_datasets():
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "whole", num_shards=2)
    return tmp_path


def all_of(dataset: Any, folder: Path) -> list[dict[str, Any]]:
    rows = open_rows(dataset, folder=folder)
    return rows.get(range(len(rows)))


def failure(dataset: Any, folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_rows(dataset, folder=folder)
    return str(error.value)


def test_a_saved_dataset_is_read_without_cached_files(folder: Path) -> None:
    assert all_of("parts", folder) == ROWS[:4]
    assert all_of(folder / "parts", Path("elsewhere")) == ROWS[:4]
    assert all_of({"type": "hub", "name": "parts", "split": "test"}, folder) == ROWS[5:]
    assert all_of("whole", folder) == all_of("whole/", folder) == ROWS
    assert open_rows("parts", folder=folder).key(1) == "parts/train:2"
    assert open_rows("whole", folder=folder).key(1) == "whole:2"


def test_the_fingerprint_of_a_saved_dataset_depends_on_its_rows_only(folder: Path) -> None:
    save(folder / "same", train=ROWS[:4])
    save(folder / "other", train=[*ROWS[:3], ROWS[4]])
    found = {name: open_rows(name, folder=folder).fingerprint for name in ("parts", "same", "other")}
    assert found["parts"] == found["same"] != found["other"]


def test_every_source_of_a_run_may_be_a_saved_dataset(
    folder: Path, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    held_out = {name: {"type": "hub", "name": "parts", "split": name} for name in ("validation", "test")}
    sizes = {"training": 4, "validation": 1, "test": 1}
    config = make_config(data={"source": "parts", **held_out})
    assert {name: len(rows) for name, rows in open_splits(config, folder=folder).items()} == sizes
    passed = open_run_data(make_config(data=held_out), folder=folder, dataset="parts")
    assert passed.num_rows == sizes
    mix = make_config(data={"mix": [{"source": "parts"}, {"source": "whole"}], **held_out})
    assert len(open_splits(mix, folder=folder)["training"]) == 10


@pytest.mark.parametrize(("name", "number"), [("parts", 4), ("whole", 6)])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_dataset_is_streamed(folder: Path, name: str, number: int, shards: int) -> None:
    stream = open_stream(HubSource(type="hub", name=name, streaming=True), folder=folder, least_shards=shards)
    read = [row.row for shard in range(len(stream.shards)) for row, _ in stream.read(shard, None)]
    assert sorted(map(str, read)) == sorted(map(str, ROWS[:number]))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"name": "parts", "split": "dev"},
            "parts has no split dev, only train, validation, test; write {type: hub, name: parts, split: ...}",
        ),
        ({"name": "whole", "split": "test"}, "whole is a single dataset without splits; remove split: test"),
        ({"name": "whole", "subset": "en"}, "whole is a folder of save_to_disk, which has no subset; remove subset"),
        ({"name": "parts", "revision": "v1"}, "parts is a folder of save_to_disk, which has no revision; remove"),
    ],
)
def test_what_a_saved_dataset_does_not_have_is_an_error(source: Any, expected: str, folder: Path) -> None:
    assert failure({"type": "hub", **source}, folder).startswith(expected)
    with pytest.raises(DataError) as error:
        open_stream(HubSource(type="hub", **source), folder=folder, least_shards=1)
    assert str(error.value).startswith(expected)


def test_the_split_of_a_single_saved_dataset_may_be_named(tmp_path: Path) -> None:
    with quiet_datasets():
        datasets.Dataset.from_list(ROWS, split="test").save_to_disk(tmp_path / "one")
    assert all_of("one", tmp_path) == all_of({"type": "hub", "name": "one", "split": "test"}, tmp_path) == ROWS


def test_a_saved_dataset_without_rows_is_an_error(tmp_path: Path) -> None:
    with quiet_datasets():
        datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    assert failure("none", tmp_path).endswith("none has no rows")


def test_a_saved_dataset_beside_files_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "train.csv").write_text("text\na\nb\n")
    with quiet_datasets():
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "both" / "cached")
    assert [row["text"] for row in all_of("both", tmp_path)] == ["a", "b"]


def test_a_folder_of_saved_datasets_is_refused(folder: Path) -> None:
    (folder / "parts" / "dataset_dict.json").unlink()
    expected = (
        "parts is a folder of datasets that save_to_disk has written (test, train, validation); write one of them, "
        "such as parts/test"
    )
    source = HubSource(type="hub", name="parts")
    assert failure(source, folder) == expected
    with pytest.raises(DataError) as error:
        open_stream(source, folder=folder, least_shards=1)
    assert str(error.value) == expected


def test_a_damaged_saved_dataset_is_reported(folder: Path) -> None:
    (folder / "parts" / "dataset_dict.json").write_text('{"splits": ["train", "gone"]}')
    assert "parts cannot be read: FileNotFoundError: " in failure("parts", folder)


@pytest.mark.parametrize("place", [".", "nested"])
def test_files_with_columns_in_another_order_are_named_in_the_error_and_can_be_read(tmp_path: Path, place: str) -> None:
    (tmp_path / "set" / place).mkdir(parents=True)
    (tmp_path / "set" / "README.md").write_text("A description.\n")
    (tmp_path / "set" / place / "a.csv").write_text("question,answer\nwhy 0?,because 0\n")
    (tmp_path / "set" / place / "b.csv").write_text("answer,question\nbecause 1,why 1?\n")
    message = failure("set", tmp_path)
    glob = f"{tmp_path}/set/{'*' if place == '.' else '**/*'}.csv"
    assert "Schema at index 1 was different" in message
    assert message.endswith(f"; to read its files as they are, write {glob}")
    assert all_of(glob, tmp_path) == ROWS[:2]


def test_compressed_files_are_named_with_both_extensions(tmp_path: Path) -> None:
    for name, row in (("a", {"x": 1}), ("b", {"x": {"y": "text"}})):
        (tmp_path / f"{name}.v2.jsonl").write_text(json.dumps(row))
    assert failure(str(tmp_path), tmp_path).endswith(f"write {tmp_path}/*.jsonl")
    for name in ("a", "b"):
        (tmp_path / f"{name}.v2.jsonl").rename(tmp_path / f"{name}.v2.jsonl.gz")
    assert failure(str(tmp_path), tmp_path).endswith(f"write {tmp_path}/*.jsonl.gz")


def test_a_folder_without_data_has_no_files_to_name(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("text")
    assert "to read its files" not in failure(str(tmp_path), tmp_path)
