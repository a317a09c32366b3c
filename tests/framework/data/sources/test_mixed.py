import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.rows import Rows
from partita.data.sources.mixed import MixedOrder, joined, mixed_order, source_sizes
from partita.data.sources.sources import open_rows
from partita.data.splits import open_splits
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError
from partita_schema.load import load_config
from partita_schema.sections.sources import CustomSource


def write(path: Path, count: int, **extra: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"q": f"{path.stem} {i}", "a": "yes", **extra}) + "\n" for i in range(count)))


def config_of(**data: Any) -> Config:
    return load_config(
        {
            "model_type": "llm",
            "base_model": "base",
            "input_features": [{"name": "q", "type": "text"}],
            "output_features": [{"name": "a", "type": "text"}],
            "trainer": {"type": "finetune"},
            "data": data,
        }
    ).config


def mix(*parts: Any) -> list[dict[str, Any]]:
    return [part if isinstance(part, dict) else {"source": part} for part in parts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "one" / "train.jsonl", 200)
    write(tmp_path / "two" / "train.jsonl", 40, b="more")
    return tmp_path


MIX = mix({"source": "one/train.jsonl", "weight": 3, "name": "first"}, "two/train.jsonl")


def sources_of(rows: Rows) -> Counter[str]:
    return Counter(key.partition("/")[0] for key in rows.keys)


def test_sources_of_a_mix_are_concatenated_with_their_names(folder: Path) -> None:
    parts = {name: open_rows(f"{name}/train.jsonl", folder=folder) for name in ("one", "two")}
    rows = joined(parts)

    assert len(rows) == 240
    assert rows.columns == ("q", "a", "b")
    assert [rows.key(index) for index in (0, 199, 200, 239)] == [
        "one/train.jsonl:1",
        "one/train.jsonl:200",
        "two/train.jsonl:1",
        "two/train.jsonl:40",
    ]
    some = np.array([239, 0, 200, 199, 5])
    expected = [row for part in parts.values() for row in part.get(range(len(part)))]
    assert rows.get(some) == [expected[index] for index in some]
    assert rows.select([3, 210]).get([1]) == [expected[210]]
    assert rows.fingerprint == joined(parts).fingerprint != joined(dict(reversed(parts.items()))).fingerprint


def test_bad_rows_of_a_mix_keep_their_source(folder: Path) -> None:
    with (folder / "two" / "train.jsonl").open("a") as file:
        file.write("broken\n")
    splits = open_splits(config_of(mix=MIX), folder=folder)

    assert [(row.key, row.file, row.number) for row in splits["training"].bad] == [
        ("train/train.jsonl:41", "train/train.jsonl", 41)
    ]


def test_each_source_has_its_share_of_every_split(folder: Path) -> None:
    split = {"type": "random", "probabilities": [0.7, 0.2, 0.1]}
    splits = open_splits(config_of(mix=MIX, split=split), folder=folder)

    assert {name: dict(sources_of(rows)) for name, rows in splits.items()} == {
        "training": {"first": 140, "train": 28},
        "validation": {"first": 40, "train": 8},
        "test": {"first": 20, "train": 4},
    }


def test_a_sample_is_taken_from_each_source_by_its_size(folder: Path) -> None:
    config = config_of(mix=MIX)
    sampled = config.model_copy(update={"preprocessing": config.preprocessing.model_copy(update={"sample_size": 120})})
    splits = open_splits(sampled, folder=folder)

    assert sum(sum((sources_of(rows) for rows in splits.values()), Counter[str]()).values()) == 120
    assert sum(sources_of(rows)["first"] for rows in splits.values()) == 100


@pytest.mark.parametrize(("size", "rows"), [(2, (1, 1)), (3, (2, 1)), (5, (4, 1)), (10, (8, 2)), (239, (199, 40))])
def test_a_sample_of_a_mix_has_the_rows_that_were_asked_for(folder: Path, size: int, rows: tuple[int, int]) -> None:
    config = Config.model_validate({**config_of(mix=MIX).model_dump(), "preprocessing": {"sample_size": size}})
    splits = open_splits(config, folder=folder)
    counts = sum((sources_of(part) for part in splits.values()), Counter[str]())
    assert (counts["first"], counts["train"]) == rows


def test_a_sample_of_a_mix_has_a_row_of_each_source(folder: Path) -> None:
    config = Config.model_validate({**config_of(mix=MIX).model_dump(), "preprocessing": {"sample_size": 1}})
    message = "preprocessing.sample_size is 1, and data.mix needs a row of each of its 2 sources; write at least 2"
    with pytest.raises(DataError, match=re.escape(message)):
        open_splits(config, folder=folder)


def test_the_order_of_a_mix_follows_its_shares(folder: Path) -> None:
    config = config_of(mix=MIX, stop="first")
    training = open_splits(config, folder=folder)["training"]
    mixed = mixed_order(config.data, training.keys)
    assert isinstance(mixed, MixedOrder)
    rows = training.select(mixed.order(0, np.random.default_rng(0)))
    counts = sources_of(rows)

    assert source_sizes(config.data, training.keys) == {"first": 180, "train": 36}
    assert counts["train"] == 36
    assert abs(counts["first"] - 3 * counts["train"]) <= 4
    assert mixed.fingerprint_inputs == {"mix": "weights 3, 1, stop first"}


def test_without_weights_each_row_occurs_once_and_sources_are_spread_evenly(folder: Path) -> None:
    config = config_of(mix=mix({"source": "one/train.jsonl", "name": "first"}, "two/train.jsonl"), stop="all_once")
    training = open_splits(config, folder=folder)["training"]
    mixed = mixed_order(config.data, training.keys)
    assert isinstance(mixed, MixedOrder)
    order = mixed.order(0, np.random.default_rng(0))
    sizes = source_sizes(config.data, training.keys)
    rare = np.array([key.startswith("train/") for key in training.select(order).keys])

    assert sizes == {"first": 180, "train": 36}
    assert sorted(order.tolist()) == list(range(216))
    assert rare.reshape(36, 6).sum(axis=1).tolist() == [1] * 36
    assert mixed.fingerprint_inputs == {"mix": "weights by size, stop all_once"}
    equal = config_of(
        mix=mix({"source": "one/train.jsonl", "name": "first", "weight": 1}, "two/train.jsonl"), stop="all_once"
    )
    written = mixed_order(equal.data, training.keys)
    assert isinstance(written, MixedOrder)
    first = training.select(written.order(0, np.random.default_rng(0))[:72])
    assert sources_of(first) == {"first": 36, "train": 36}


def test_rows_without_a_mix_have_no_mixed_order(folder: Path) -> None:
    config = config_of(mix=MIX)
    assert mixed_order(config.data, open_rows("one/train.jsonl", folder=folder).keys) is None
    assert (
        mixed_order(config_of(source="one/train.jsonl").data, open_rows("one/train.jsonl", folder=folder).keys) is None
    )


def test_a_source_without_usable_rows_is_reported(folder: Path) -> None:
    config = config_of(mix=MIX)
    training = open_splits(config, folder=folder)["training"]

    with pytest.raises(DataError, match=r"train of data.mix has no rows to train on; remove it, or see why in"):
        mixed_order(config.data, training.keys.take(np.arange(100)))


def test_a_column_that_one_source_lacks_is_reported_with_the_source(folder: Path) -> None:
    (folder / "three.jsonl").write_text('{"x": 1}\n')

    with pytest.raises(DataError, match=r"three.jsonl has no column 'q', which"):
        open_splits(config_of(mix=mix("one/train.jsonl", "three.jsonl")), folder=folder)


def test_names_of_a_mix_distinguish_its_sources() -> None:
    parts = mix("a/train.jsonl.gz", "b/train.jsonl", "s3://data/wiki/*.parquet", "org/chats", {"source": "c.csv"})
    parts += mix({"source": {"type": "custom", "target": "mine:Rows"}}, {"source": "d.csv", "name": "train-2"}, "*.csv")

    assert config_of(mix=parts).data.mix_names == (
        "train", "train-3", "wiki", "chats", "c", "Rows", "train-2", "rows"
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"data\.mix\[1\]\.name: two sources are named 'a'; write another name"):
        config_of(mix=mix({"source": "a.csv", "name": "a"}, {"source": "b.csv", "name": "a"}))
    with pytest.raises(ConfigError, match=r"data\.mix\[0\]\.name: got 'a/b'; write a name without a slash"):
        config_of(mix=mix({"source": "a.csv", "name": "a/b"}, {"source": "b.csv"}))


SOURCES = """
import pandas


class Listed:
    def rows(self):
        return [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


class Made:
    def __init__(self, count=2):
        self.count = count

    def __iter__(self):
        return ({"q": str(2 * i + 1), "a": str(2 * i + 2)} for i in range(self.count))


class Frame:
    def rows(self):
        return pandas.DataFrame({"q": ["1", "3"], "a": ["2", "4"]})


class Stream:
    def read(self, shard, start):
        yield {"q": "1"}, 1


class Number:
    def rows(self):
        return 5
"""


def test_a_custom_class_provides_rows_by_index(tmp_path: Path) -> None:
    (tmp_path / "mixed_sources.py").write_text(SOURCES)

    def rows_of(name: str, **options: Any) -> Rows:
        return open_rows(CustomSource(type="custom", target=f"mixed_sources:{name}", options=options), folder=tmp_path)

    try:
        for name in ("Listed", "Made", "Frame"):
            rows = rows_of(name)
            assert rows.get(range(2)) == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]
            assert list(rows.keys) == [f"{name}:1", f"{name}:2"]
        assert len(rows_of("Made", count=7)) == 7
        with pytest.raises(DataError, match="Made has no rows"):
            rows_of("Made", count=0)
        with pytest.raises(DataError, match=r"Stream is read as a stream; write streaming: true, or give it a method"):
            rows_of("Stream")
        with pytest.raises(DataError, match="a int is not a dataset"):
            rows_of("Number")
    finally:
        sys.modules.pop("mixed_sources", None)
