"""Tests of DataLoader: the batches of a training run, every row once an epoch, an exact position, shared steps."""

import hashlib
import json
import logging
import multiprocessing
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model
from partita.data import DataLoader
from partita.distributed.thread_group import ThreadGroup
from partita.distributed.world import get_world
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import ConfigError, DataError, ModelError, PartitaError, ResumeError
from partita_trainers import Batch
from partita_trainers.process_group import SINGLE_PROCESS
from partita_trainers.steps.step_stats import batch_digest

from ...json_lines import read_json_lines, write_json_lines

ROWS = [{"question": "q" * (1 + number * 7 % 23), "answer": f"a{number}"} for number in range(23)]
ALL_ROWS = {"type": "random", "probabilities": [1.0, 0, 0]}
STREAMED = {"type": "jsonl", "path": "part-*.jsonl", "streaming": True}
BATCHINGS: dict[str, dict[str, Any]] = {
    "fixed": {"type": "fixed"},
    "bucket": {"type": "bucket", "window": 8, "noise": 0.1},
    "token_budget": {"type": "token_budget", "max_tokens": 96, "window": 8},
    "pack": {"type": "pack", "max_tokens": 64, "window": 8},
}
CHUNKS = {"type": "chunk", "context_length": 32, "window": 8}


def settings(**changes: Any) -> dict[str, Any]:
    """Return a configuration; sections in `changes` are merged into it."""
    base: dict[str, Any] = {
        "base_model": {
            "type": "scratch",
            "tokenizer": "byte",
            "vocab_size": 300,
            "context_length": 64,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"split": ALL_ROWS},
        "preprocessing": {"global_max_sequence_length": 64},
        "trainer": {"type": "finetune", "batch_size": 3},
    }
    return {
        name: {**base[name], **values} if isinstance(base.get(name), dict) and isinstance(values, dict) else values
        for name, values in (base | changes).items()
    }


def streamed(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration that streams ROWS from two files in `folder`."""
    write_json_lines(folder / "part-0.jsonl", ROWS[:15])
    write_json_lines(folder / "part-1.jsonl", ROWS[15:])
    source = {**STREAMED, "path": str(folder / "part-*.jsonl")}
    config = settings(trainer={"max_steps": 5}, **changes)
    del config["data"]["split"]
    config["data"]["source"] = source
    if config["data"].get("batching", {}).get("type") == "token_budget":
        del config["trainer"]["batch_size"]
    return config


def indexed(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration that reads ROWS from a file in `folder` by index."""
    write_json_lines(folder / "rows.jsonl", ROWS)
    config = settings(**changes)
    config["data"]["source"] = str(folder / "rows.jsonl")
    if config["data"].get("batching", {}).get("type") == "token_budget":
        del config["trainer"]["batch_size"]
    return config


def language_model(config: dict[str, Any], **batching: Any) -> dict[str, Any]:
    """Return the configuration with its answers as documents that are cut into chunks."""
    del config["input_features"], config["preprocessing"]
    config["data"]["batching"] = {**CHUNKS, **batching}
    config["output_features"] = [{"name": "question", "type": "text"}]
    return config


def mixed(config: dict[str, Any], folder: Path, *, file: str, **source: Any) -> dict[str, Any]:
    """Return the configuration with a mix of a file in `folder` and a few more rows."""
    write_json_lines(folder / "more.jsonl", ROWS[:5])
    del config["data"]["source"]
    config["data"]["mix"] = [
        {"source": {"type": "jsonl", "path": str(folder / name), **source}, "weight": weight}
        for name, weight in ((file, 3), ("more.jsonl", 1))
    ]
    return config


KINDS = {
    **{name: lambda folder, name=name: indexed(folder, data={"batching": BATCHINGS[name]}) for name in BATCHINGS},
    **{
        f"streamed {name}": lambda folder, name=name: streamed(folder, data={"batching": BATCHINGS[name]})
        for name in BATCHINGS
    },
    "mix": lambda folder: mixed(indexed(folder), folder, file="rows.jsonl"),
    "streamed mix": lambda folder: mixed(streamed(folder), folder, file="part-0.jsonl", streaming=True),
    "chunk": lambda folder: language_model(indexed(folder)),
    "isolated documents": lambda folder: language_model(indexed(folder), isolate_documents=True),
    "streamed chunk": lambda folder: language_model(streamed(folder)),
}
"""Functions that write the rows to a folder and return a configuration that reads them."""


def plain(batch: Batch) -> Any:
    positions = None if batch.position_ids_BT is None else batch.position_ids_BT.tolist()
    return batch.keys, batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), positions


def keys_of(batches: list[Any]) -> Counter[str]:
    return Counter(key for keys, *_ in batches for key in keys)


def epoch_of(loader: DataLoader) -> list[Any]:
    return list(map(plain, loader))


def batch_hash(batch: Batch) -> str:
    return hashlib.blake2b(batch_digest(batch), digest_size=8).hexdigest()


@pytest.mark.parametrize("kind", ["bucket", "streamed pack", "chunk"])
def test_batches_are_those_of_a_training_run(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind](tmp_path)
    config["trainer"] |= {"max_steps": 9, "gradient_accumulation_steps": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf8")

    Model(tmp_path / "run.yaml", quiet=True).train(run=tmp_path / "run")
    loader = DataLoader(tmp_path / "run.yaml")
    hashes: list[str] = []
    while len(hashes) < 9:
        hashes += map(batch_hash, loader)

    assert loader.next_epoch > 1, "the steps span two epochs"
    assert [line["batch_hash"] for line in read_json_lines(tmp_path / "run" / "log.jsonl")] == hashes[:9]


@pytest.mark.parametrize("kind", [*BATCHINGS, *(f"streamed {name}" for name in BATCHINGS)])
def test_every_row_is_in_one_batch_of_an_epoch_and_epochs_differ(tmp_path: Path, kind: str) -> None:
    with DataLoader(KINDS[kind](tmp_path)) as loader:
        first, second = epoch_of(loader), epoch_of(loader)

        assert keys_of(first) == keys_of(second)
        assert len(keys_of(first)) == sum(keys_of(first).values()) == len(ROWS)
        assert first != second
        assert loader.next_epoch == 2
        assert loader.row_counts.used == loader.row_counts.rows == len(ROWS)
        if "streamed" not in kind:
            assert len(loader) == len(first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_two_epochs_is_the_same_from_every_batch(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind](tmp_path)
    loader = DataLoader(config)
    batches, states, ends = [], [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(plain(batch))
            states.append(loader.state_dict())
        ends.append(len(batches))
    last = loader.state_dict()

    for number, state in enumerate(states):
        resumed = DataLoader(config)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        rest: list[Any] = []
        for _ in range(resumed.next_epoch, 2):
            rest += epoch_of(resumed)
            assert number + len(rest) in ends, "an iterator ends with its epoch"
        assert rest == batches[number:]
        assert resumed.state_dict() == last
        assert resumed.row_counts.used == loader.row_counts.used


@pytest.mark.parametrize("kind", ["fixed", "streamed fixed"])
def test_a_state_after_an_epoch_continues_with_the_next_one(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind](tmp_path)
    loader = DataLoader(config)
    epoch_of(loader)
    state = loader.state_dict()
    second = epoch_of(loader)

    resumed = DataLoader(config)
    resumed.load_state_dict(state)
    assert resumed.next_epoch == 1
    assert epoch_of(resumed) == second


@pytest.mark.parametrize("kind", ["fixed", "streamed fixed"])
def test_a_new_iterator_skips_the_rest_of_an_epoch(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind](tmp_path)
    loader = DataLoader(config)
    epoch_of(loader)
    second = epoch_of(loader)

    broken = DataLoader(config)
    for number, _ in enumerate(broken):
        if number == 2:
            break
    unfinished = broken.state_dict()
    following = iter(broken)
    begun = broken.state_dict()
    assert list(map(plain, following)) == second

    for state, left in ((unfinished, len(second) - 3), (begun, len(second))):
        resumed = DataLoader(config)
        resumed.load_state_dict(state)
        assert len(epoch_of(resumed)) == left


def test_an_iterator_ends_with_an_error_when_another_one_is_created() -> None:
    loader = DataLoader(settings(), ROWS)
    earlier = iter(loader)
    next(earlier)
    next(iter(loader))
    with pytest.raises(DataError, match="another iterator of it was created; use one iterator at a time"):
        next(earlier)


def test_worker_processes_end_with_an_iterator_that_is_left(tmp_path: Path) -> None:
    config = streamed(tmp_path, data={"batching": {"type": "fixed"}, "loader": {"workers": 1}})
    wanted = epoch_of(DataLoader(KINDS["streamed fixed"](tmp_path)))
    with DataLoader(config) as loader:
        assert epoch_of(loader) == wanted
        for _ in loader:
            assert multiprocessing.active_children()
            break
        assert multiprocessing.active_children() == []
        held = iter(loader)
        next(held)
        assert multiprocessing.active_children()
    assert multiprocessing.active_children() == []
    with pytest.raises(DataError, match="the DataLoader was closed"):
        next(held)


@pytest.mark.parametrize("kind", ["fixed", "streamed bucket"])
def test_two_ranks_share_the_steps_and_resume_from_the_same_state(tmp_path: Path, kind: str) -> None:
    config = KINDS[kind](tmp_path)

    def run(group: ThreadGroup, state: Any = None) -> tuple[list[Any], list[Any]]:
        loader = DataLoader(config, process_group=group)
        if state is not None:
            loader.load_state_dict(state)
        batches, states = [], []
        for batch in loader:
            batches.append(plain(batch))
            states.append(loader.state_dict())
        return batches, states

    with ThreadPoolExecutor(2) as pool:
        (first, states), (second, other_states) = pool.map(run, ThreadGroup.of(2))
        assert states == other_states
        assert len(first) == len(second)
        counted = keys_of(first) + keys_of(second)
        assert len(counted) == sum(counted.values()) == len(ROWS)
        for number in (0, 2):
            rest = list(pool.map(lambda group, number=number: run(group, states[number])[0], ThreadGroup.of(2)))
            assert rest == [first[number + 1 :], second[number + 1 :]]
    if kind == "fixed":
        (single,) = (epoch_of(DataLoader(config)),)
        shared = [batch for step in zip(first, second, strict=True) for batch in step if batch[0]]
        assert shared == single


def test_a_state_of_another_number_of_processes_is_refused() -> None:
    state = DataLoader(settings(), ROWS).state_dict()
    with ThreadPoolExecutor(2) as pool:
        loaders = list(pool.map(lambda group: DataLoader(settings(), ROWS, process_group=group), ThreadGroup.of(2)))
    with pytest.raises(ResumeError, match="batches a step: 1 -> 2"):
        loaders[0].load_state_dict(state)


def test_a_process_of_several_needs_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    get_world.cache_clear()
    try:
        with pytest.raises(
            PartitaError, match=r"this is one of 4 processes, and torch\.distributed is not initialized"
        ):
            DataLoader(settings(), ROWS)
        assert len(DataLoader(settings(), ROWS, process_group=SINGLE_PROCESS)) == 8
    finally:
        get_world.cache_clear()


def test_cached_tokens_give_the_same_batches() -> None:
    wanted = epoch_of(DataLoader(settings(), ROWS))
    for _ in range(2):  # the second time, the tokens are read from the cache
        assert epoch_of(DataLoader(settings(data={"encode": "cache"}), ROWS)) == wanted


def test_a_stream_has_no_length(tmp_path: Path) -> None:
    loader = DataLoader(KINDS["streamed fixed"](tmp_path))
    with pytest.raises(TypeError, match="a streamed DataLoader has no length"):
        len(loader)
    assert repr(loader) == "<DataLoader: streamed, next epoch 0>"
    assert repr(DataLoader(settings(), ROWS)) == "<DataLoader: 8 batches an epoch, next epoch 0>"


def test_the_argument_replaces_the_batch_size_of_the_file() -> None:
    batches = list(DataLoader(settings(), ROWS, batch_size=10))
    assert sorted(batch.rows for batch in batches) == [3, 10, 10]
    automatic = settings(trainer={"batch_size": "auto"})
    assert len(DataLoader(automatic, ROWS, batch_size=10)) == 3
    assert len(DataLoader(automatic, ROWS, overrides=["trainer.batch_size=10"])) == 3


@pytest.mark.parametrize(
    ("changes", "batch_size", "message"),
    [
        (
            {"trainer": {"batch_size": "auto"}},
            None,
            (
                "trainer.batch_size: is auto, which only `partita train` can measure; write a number, or pass "
                "batch_size to DataLoader"
            ),
        ),
        ({}, 0, "batch_size: is 0; pass a whole number of at least 1"),
        ({}, True, "batch_size: is True; pass a whole number of at least 1"),
        (
            {"trainer": {"batch_size": "auto"}, "data": {"batching": {"type": "token_budget"}}},
            None,
            (
                "data.batching.max_tokens: is auto, which only `partita train` can measure; write a number of tokens, "
                "such as 4096"
            ),
        ),
        (
            {"trainer": {"batch_size": "auto"}, "data": {"batching": {"type": "token_budget", "max_tokens": 96}}},
            4,
            "data.batching: batch_size has no effect with a token budget; write max_tokens or max_rows here",
        ),
    ],
)
def test_a_batch_size_that_cannot_be_used_is_refused(changes: Any, batch_size: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DataLoader(settings(**changes), ROWS, batch_size=batch_size)
    assert str(caught.value) == message


def test_a_trainer_that_reads_no_batches_in_order_is_refused() -> None:
    untrained = settings()
    del untrained["trainer"]
    hogwild = {
        "base_model": {"type": "embedding_bag"},
        "input_features": [{"name": "question"}],
        "output_features": [{"name": "answer", "type": "category"}],
        "trainer": {"type": "hogwild"},
    }
    for config, message in (
        (untrained, "trainer: nothing is trained, so there are no training rows; write "),
        (hogwild, "trainer.type: is hogwild, whose workers draw their rows themselves; write "),
    ):
        with pytest.raises(ConfigError) as caught:
            DataLoader(config, ROWS, batch_size=4)
        assert str(caught.value) == message + "trainer: {type: finetune, batch_size: 8}"


def test_states_that_do_not_fit_are_refused() -> None:
    loader = DataLoader(settings(), ROWS)
    state = loader.state_dict()
    for wrong, message in (
        ({}, r"this is not a state of a DataLoader \(version None, expected 1\); load what state_dict\(\) returned"),
        ({**state, "epoch": -1}, "the state of the DataLoader is damaged; load an older one"),
        ({**state, "data_position": {**state["data_position"], "step": 3}}, "has no such position"),
    ):
        with pytest.raises(ResumeError, match=message):
            loader.load_state_dict(wrong)
    with pytest.raises(ResumeError, match="batch size: 3 -> 4"):
        DataLoader(settings(), ROWS, batch_size=4).load_state_dict(state)
    next(iter(loader))
    with pytest.raises(ResumeError, match="before the first iterator is created; create a new DataLoader"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(("resume", "epoch"), [("restart_epoch", 1), ("fresh", 0)])
def test_changed_data_restarts_as_data_resume_says(resume: str, epoch: int) -> None:
    loader = DataLoader(settings(), ROWS)
    epoch_of(loader)
    next(iter(loader))
    changed = DataLoader(settings(data={"resume": resume}), ROWS[:20])
    changed.load_state_dict(loader.state_dict())
    assert changed.next_epoch == epoch
    assert sum(keys_of(epoch_of(changed)).values()) == 20


def test_a_stream_that_changed_after_an_epoch_is_counted_and_checked_in_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = KINDS["streamed fixed"](tmp_path)
    loader = DataLoader(config)
    epoch_of(loader)
    with (tmp_path / "part-1.jsonl").open("a", encoding="utf8") as file:
        file.write('{"question": "no answer"}\n')
    config["data"]["resume"] = "restart_epoch"
    strict = DataLoader(config)
    strict.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="1 of 24 rows cannot be used"):
        epoch_of(strict)

    config["data"]["max_bad_rows"] = 1
    lenient = DataLoader(config)
    lenient.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.WARNING, logger="partita.data.data_loader"):
        assert sum(keys_of(epoch_of(lenient)).values()) == len(ROWS)
    assert (lenient.row_counts.rows, lenient.row_counts.left_out) == (24, 1)
    assert "1 of 24 training rows left out" in caplog.text


@pytest.mark.parametrize("kind", ["fixed", "streamed fixed"])
def test_bad_rows_are_counted_logged_and_limited(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    config = KINDS[kind](tmp_path)
    broken = tmp_path / ("part-1.jsonl" if "streamed" in kind else "rows.jsonl")
    with broken.open("a", encoding="utf8") as file:
        file.write('{"question": "no answer"}\n')
    with pytest.raises(DataError, match="1 of 24 rows cannot be used"):
        epoch_of(DataLoader(config))

    config["data"]["max_bad_rows"] = 1
    with caplog.at_level(logging.WARNING, logger="partita.data.data_loader"):
        loader = DataLoader(config)
        assert sum(keys_of(epoch_of(loader)).values()) == len(ROWS)
        epoch_of(loader)
    assert loader.row_counts.left_out == 1
    assert list(loader.row_counts.reasons.values()) == [1]
    assert [record.getMessage().split("\n")[0] for record in caplog.records] == ["1 of 24 training rows left out:"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_limit_of_bad_rows_is_a_share_of_the_answers(tmp_path: Path, streaming: bool) -> None:
    def dialogue(*questions: str) -> dict[str, Any]:
        messages = [(("user", question), ("assistant", "yes")) for question in questions]
        return {"messages": [{"role": role, "content": text} for pair in messages for role, text in pair]}

    write_json_lines(
        tmp_path / "dialogues.jsonl",
        [dialogue(*"abcd", *(["q" * 80] if number % 40 == 0 else [])) for number in range(320)],
    )
    config = settings(
        input_features=[{"name": "messages", "type": "dialogue"}],
        data={"dialogue": {"mode": "squash"}},
        trainer={"max_steps": 5} if streaming else {},
    )
    config["data"]["source"] = {"type": "jsonl", "path": str(tmp_path / "dialogues.jsonl"), "streaming": streaming}
    if streaming:
        del config["data"]["split"]

    loader = DataLoader(config)

    assert len(keys_of(epoch_of(loader))) == 1280
    assert (loader.row_counts.rows, loader.row_counts.used, loader.row_counts.left_out) == (1288, 1280, 8)


def test_without_rows_the_error_says_what_to_write() -> None:
    with pytest.raises(DataError, match=r"there are no rows: write data.source in the file, or pass a dataset"):
        DataLoader(settings())


def test_the_tokenizer_may_be_passed_and_is_returned() -> None:
    words = settings(base_model={"tokenizer": "word"})
    trained = DataLoader(words, ROWS)
    again = DataLoader(words, ROWS, tokenizer=trained.tokenizer)
    assert again.tokenizer is trained.tokenizer
    assert epoch_of(again) == epoch_of(trained)

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ModelError, match=r"no pad token; set tokenizer\.pad_token = tokenizer\.eos_token"):
        DataLoader(words, ROWS, tokenizer=tokenizer)
    with pytest.raises(ModelError, match="the tokenizer is a str; pass a fast one, as AutoTokenizer loads it"):
        DataLoader(words, ROWS, tokenizer="words")  # type: ignore[arg-type]


def test_rows_are_cut_at_the_context_of_the_models_config(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(max_position_embeddings=26).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = settings(trainer={"batch_size": len(ROWS)}) | {"base_model": str(tmp_path)}
    del config["preprocessing"]

    (batch,) = DataLoader(config, ROWS)
    assert batch.input_ids_BT.shape == (len(ROWS), 26)
    (batch,) = DataLoader(config, ROWS, context_length=24)
    assert batch.input_ids_BT.shape == (len(ROWS), 24)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="config"):
        DataLoader(config, ROWS)
