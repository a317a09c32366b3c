"""Tests of datasets passed in Python: read by index, streamed, or with splits."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.data.batching.collate import collate
from partita.data.batching.policies import build_policy
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.run_data import open_run_data
from partita.data.sources.python_datasets import MapStore, is_stream, splits_of
from partita.data.sources.sources import open_rows
from partita.data.streams.custom import IndexedRows
from partita.data.streams.stream_loader import StreamLoader, count_shard_groups
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, ResumeError
from partita_schema.sections.batching import FixedBatching
from partita_schema.sections.data import LoaderOptions

ROWS = [{"text": f"row {number}", "number": number} for number in range(1300)]


class Numbered(torch.utils.data.Dataset[dict[str, Any]]):
    """A torch map-style dataset that counts its reads."""

    def __init__(self, length: int = 20, fingerprint: str | None = None) -> None:
        self.length, self.reads = length, 0
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return ROWS[index]


class Streamed(torch.utils.data.IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def generate() -> Iterator[dict[str, Any]]:
    yield from ROWS


def hf_stream(*, shards: int = 1) -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=shards)


STREAMS: dict[str, Callable[[], Any]] = {
    "torch iterable": Streamed,
    "generator function": lambda: generate,
    "datasets": hf_stream,
    "datasets, 3 shards": lambda: hf_stream(shards=3),
    "datasets, map": lambda: hf_stream(shards=2).map(lambda row: {"text": row["text"].upper()}),
    "datasets, filter": lambda: hf_stream(shards=2).filter(lambda row: row["number"] % 3 > 0),
    "datasets, shuffle buffer": lambda: hf_stream(shards=2).shuffle(seed=1, buffer_size=50),
}


def make_config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "base_model": "unused",
        "output_features": [{"name": "text", "type": "text"}],
        "data": {"batching": {"type": "fixed"}},
        "trainer": {"type": "finetune", "max_steps": 5},
    }
    return Config.model_validate(base | changes)


@pytest.mark.parametrize("name", STREAMS)
def test_iterables_are_streams(name: str) -> None:
    assert is_stream(STREAMS[name]())


@pytest.mark.parametrize(
    "dataset",
    [[{"text": "a"}], {"text": ["a"]}, "rows.jsonl", Path("rows.jsonl"), Numbered(), np.zeros(3)],
    ids=lambda dataset: type(dataset).__name__,
)
def test_other_objects_are_not_streams(dataset: Any) -> None:
    assert not is_stream(dataset)


def test_a_map_style_dataset_is_read_by_index() -> None:
    rows = open_rows(Numbered(), folder=Path())

    assert len(rows) == 20
    assert rows.columns == ("text", "number")
    assert rows.get([3, 19]) == [ROWS[3], ROWS[19]]
    assert rows.fingerprint == open_rows(Numbered(), folder=Path()).fingerprint
    assert rows.fingerprint != open_rows(Numbered(19), folder=Path()).fingerprint


def test_a_map_style_dataset_with_a_fingerprint_is_not_read_for_its_hash() -> None:
    dataset = Numbered(fingerprint="version 1")

    rows = open_rows(dataset, folder=Path())

    assert dataset.reads == 1, "the first row, for its columns"
    assert rows.fingerprint != open_rows(Numbered(fingerprint="version 2"), folder=Path()).fingerprint


def test_items_of_a_map_style_dataset_are_mappings() -> None:
    with pytest.raises(DataError) as error:
        open_rows(torch.utils.data.TensorDataset(torch.arange(3)), folder=Path())
    assert str(error.value) == "item 0 of TensorDataset is of type tuple; return a dict of column to value"


def test_columns_are_those_of_all_rows_of_a_map_style_dataset() -> None:
    class Sparse(Numbered):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": "a"} if index % 2 else {"number": index}

    assert open_rows(Sparse(), folder=Path()).columns == ("number", "text")


def test_an_error_of_a_dataset_names_the_item() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise OSError("no such image")

    with pytest.raises(DataError) as error:
        open_rows(Broken(), folder=Path())
    assert str(error.value) == "item 0 of Broken raised OSError: no such image (test_python_datasets.py, line 134)"


def fails() -> Iterator[dict[str, Any]]:
    yield ROWS[0]
    raise KeyError("boom")


def test_an_error_of_a_generator_function_names_it() -> None:
    with pytest.raises(DataError) as error:
        open_rows(fails, folder=Path())
    assert str(error.value) == "fails raised KeyError: 'boom' (test_python_datasets.py, line 143)"


def test_a_torch_iterable_with_a_length_is_a_stream() -> None:
    class Counted(Streamed):
        def __len__(self) -> int:
            return len(ROWS)

    assert is_stream(Counted())
    assert len(open_rows(Counted(), folder=Path())) == 1300


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_read_whole_for_predictions(name: str) -> None:
    rows = open_rows(STREAMS[name](), folder=Path())

    assert len(rows) == (866 if "filter" in name else 1300)
    assert {"text", "number"} == set(rows.columns)


def test_a_generator_can_be_read_only_once() -> None:
    with pytest.raises(DataError) as error:
        open_run_data(make_config(), folder=Path(), dataset=generate()).streams.plan(  # type: ignore[union-attr]
            build_policy(FixedBatching(type="fixed"), batch_size=4), num_groups=1
        )
    assert str(error.value) == (
        "an object of type generator can be read only once; pass the function that creates it, without calling it"
    )


def loader_of(dataset: Any, *, num_groups: int = 2, shuffle: bool = True) -> StreamLoader:
    config = make_config()
    data = open_run_data(config, folder=Path(), dataset=dataset)
    assert data.streams is not None
    policy = build_policy(FixedBatching(type="fixed", shuffle=shuffle), batch_size=16)
    plan = data.streams.plan(policy, num_groups=count_shard_groups(num_groups))
    return StreamLoader(
        plan,
        build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=64),
        options=LoaderOptions(),
        batches_per_step=num_groups,
        more_inputs=plan.fingerprint_inputs,
        ledger=Ledger(None, max_bad_rows=0.5),
        collate_batch=partial(collate, pad_token_id=0),
    )


def numbers_of(steps: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each row, step by step."""
    return [tuple(row) for step in steps for batch in step.micro_batches for row in batch.input_ids_BT.tolist()]


@pytest.mark.parametrize("name", STREAMS)
def test_every_row_of_a_stream_is_used_once_and_resumes_exactly(name: str) -> None:
    epoch = list(itertools.takewhile(lambda step: step.epoch == 0, loader_of(STREAMS[name]()).steps()))
    wanted = 866 if "filter" in name else 1300
    rows = numbers_of(epoch)
    assert len({tuple(token for token in row if token) for row in rows}) == len(rows) == wanted

    for at in (0, len(epoch) // 2, len(epoch) - 2):
        resumed = loader_of(STREAMS[name]())
        resumed.load_data_position(json.loads(json.dumps(epoch[at].data_position)))
        following = itertools.islice(resumed.steps(), len(epoch) - at - 1)
        assert numbers_of(following) == numbers_of(epoch[at + 1 :])


def test_a_shuffle_buffer_loses_no_row_on_resume() -> None:
    """The state of datasets does not hold the buffer's content, so rows are read again up to the position."""
    import datasets

    rows = [{"text": f"row {number}"} for number in range(3000)]

    def stream() -> Any:
        dataset = datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=1, buffer_size=100)
        return dataset.map(lambda row: {"text": row["text"] + "!"})

    def loader() -> StreamLoader:
        return loader_of(stream(), num_groups=1, shuffle=False)

    epoch = list(itertools.takewhile(lambda step: step.epoch == 0, loader().steps()))
    for at in (len(epoch) // 2, len(epoch) - 3):
        resumed = loader()
        resumed.load_data_position(json.loads(json.dumps(epoch[at].data_position)))
        following = itertools.islice(resumed.steps(), len(epoch) - at - 1)
        assert numbers_of(following) == numbers_of(epoch[at + 1 :])


@pytest.mark.parametrize("kind", ["function", "datasets"])
def test_another_stream_is_refused_on_resume(kind: str) -> None:
    import datasets

    def others() -> Iterator[dict[str, Any]]:
        yield from ROWS[5:]

    first, other = generate, others
    if kind == "datasets":
        first, other = hf_stream(), datasets.Dataset.from_list(ROWS[5:]).to_iterable_dataset()
    step = next(loader_of(first).steps())

    with pytest.raises(ResumeError, match="stream: changed"):
        loader_of(other).load_data_position(step.data_position)


def test_a_map_style_dataset_as_a_stream_is_read_once_an_epoch() -> None:
    dataset = Numbered(100)
    stream = IndexedRows(MapStore(dataset), shards=8)

    rows = [row for shard in range(8) for row, _ in stream.read(shard, None)]

    assert sorted(row["number"] for row in rows) == list(range(100))
    assert dataset.reads == 100


def test_the_state_of_a_dataset_is_the_position() -> None:
    """After a resume near the end, the rows of earlier batches are not read again."""
    import datasets

    read: list[int] = []

    def count(row: dict[str, Any]) -> dict[str, Any]:
        read.append(row["number"])
        return row

    def stream() -> Any:
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=1).map(count)

    epoch = list(
        itertools.takewhile(lambda step: step.epoch == 0, loader_of(stream(), num_groups=1, shuffle=False).steps())
    )
    resumed = loader_of(stream(), num_groups=1, shuffle=False)
    resumed.load_data_position(json.loads(json.dumps(epoch[-2].data_position)))
    read.clear()

    next(resumed.steps())

    assert min(read) > 400


def test_streams_have_the_rules_of_streams() -> None:
    with pytest.raises(ConfigError) as error:
        open_run_data(make_config(trainer={"type": "finetune"}), folder=Path(), dataset=generate)
    assert str(error.value).endswith(
        "trainer: a stream has no known length; write max_steps, the number of optimizer steps"
    )


def dataset_dict(**parts: int) -> Any:
    import datasets

    return datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[:count]) for name, count in parts.items()})


def test_a_dictionary_of_datasets_gives_the_splits() -> None:
    data = open_run_data(make_config(), folder=Path(), dataset=dataset_dict(train=10, dev=4, test=3))

    assert {name: len(rows) for name, rows in data.splits.items()} == {"training": 10, "validation": 4, "test": 3}


def test_a_dictionary_with_a_training_split_alone_is_divided() -> None:
    config = make_config(data={"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}})

    data = open_run_data(config, folder=Path(), dataset=dataset_dict(train=100))

    assert set(data.splits) == {"training", "validation", "test"}
    assert sum(map(len, data.splits.values())) == 100


def test_a_dictionary_of_streams_has_a_training_stream() -> None:
    import datasets

    passed = datasets.IterableDatasetDict({"train": hf_stream(), "validation": hf_stream().take(7)})

    data = open_run_data(make_config(), folder=Path(), dataset=passed)

    assert data.streams is not None
    assert {name: len(rows) for name, rows in data.splits.items()} == {"validation": 7}


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            {"train": 3, "foo": 2},
            (
                "split 'foo' of the DatasetDict is none of train, validation and test; pass one dataset, such as "
                "dataset['foo'], or rename it"
            ),
        ),
        ({"train": 3, "dev": 2, "validation": 1}, "the DatasetDict has two validation splits; remove 'validation'"),
    ],
)
def test_unknown_splits_are_refused(parts: dict[str, int], text: str) -> None:
    with pytest.raises(DataError) as error:
        splits_of(dataset_dict(**parts))
    assert str(error.value) == text


def test_a_dictionary_needs_a_training_split_to_train() -> None:
    with pytest.raises(DataError) as error:
        open_run_data(make_config(), folder=Path(), dataset=dataset_dict(test=3))
    assert str(error.value) == "the DatasetDict has no split train; it has test"


def test_a_split_is_not_named_twice(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    config = make_config(data={"test": "test.jsonl"})

    with pytest.raises(DataError) as error:
        open_run_data(config, folder=tmp_path, dataset=dataset_dict(train=3, test=2))
    assert str(error.value) == "the DatasetDict has a test split, and data.test names another; remove one of them"


def test_a_passed_stream_replaces_a_mix(tmp_path: Path) -> None:
    mix = [{"source": "a.jsonl"}, {"source": "b.jsonl"}]

    data = open_run_data(make_config(data={"mix": mix, "stop": "first"}), folder=tmp_path, dataset=generate)

    assert data.streams is not None
    assert not data.mixed


def test_predictions_need_one_dataset() -> None:
    with pytest.raises(DataError) as error:
        open_rows(dataset_dict(train=3, test=2), folder=Path())
    assert str(error.value) == "a DatasetDict holds several datasets; pass one of them, such as dataset['test']"


CUSTOM = """
import datasets
import torch

ROWS = [{"text": f"row {number}"} for number in range(40)]


class Streamed:
    def rows(self):
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=2)


class Torch(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(ROWS)


class Indexed(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]
"""


@pytest.mark.parametrize("name", ["Streamed", "Torch", "Indexed"])
@pytest.mark.parametrize("streaming", [False, True], ids=["index", "stream"])
def test_custom_sources_may_be_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, streaming: bool
) -> None:
    module = f"datasets_of_test_{name.lower()}_{streaming}"
    (tmp_path / f"{module}.py").write_text(CUSTOM, encoding="utf-8")
    source = {"type": "custom", "target": f"{module}:{name}", "streaming": streaming}
    config = make_config(data={"source": source, "batching": {"type": "fixed"}})

    data = open_run_data(config, folder=tmp_path)

    if streaming:
        assert data.streams is not None
        plan = data.streams.plan(build_policy(FixedBatching(type="fixed"), batch_size=4), num_groups=2)
        rows = [row for group in (0, 1) for row in plan.reader(group, epoch=0).take(100)]
        assert len(rows) == 40
    else:
        assert sum(map(len, data.splits.values())) == 40
