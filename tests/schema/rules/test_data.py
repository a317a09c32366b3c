"""Tests of the rules for combinations of values in the data section, with their messages."""

from typing import Any

import pytest

from ..refusals import problems_of

STREAM = {"type": "jsonl", "path": "a.jsonl", "streaming": True}
STEPS = {"type": "finetune", "max_steps": 5}


def problems(data: dict[str, Any], *, trainer: dict[str, Any] = STEPS, **sections: Any) -> list[str]:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "data": data,
        "trainer": trainer,
    }
    return problems_of(raw | sections)


def mix(*sources: Any, **more: Any) -> dict[str, Any]:
    return {"mix": [{"source": source} for source in sources], **more}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            mix("a.csv", "b.csv", source="c.csv"),
            "data.mix: source and mix cannot both be set; move source into mix",
        ),
        (mix("a.csv"), "data.mix: a mix needs two sources; write source for a single one"),
        (
            mix(*["a.csv"] * 1001),
            (
                "data.mix: got 1,001 sources, at most 1,000 can be mixed; write a glob (data/*.jsonl) to read many "
                "files as one source"
            ),
        ),
        ({"stop": "first"}, "data.stop: stop has no effect without mix; remove it"),
        (
            {"validation": STREAM},
            "data.validation.streaming: validation rows are all needed each time; remove streaming",
        ),
        ({"test": STREAM}, "data.test.streaming: test rows are all needed each time; remove streaming"),
        (
            mix(STREAM, "b.csv"),
            "data.mix: the sources of a mix are all streamed, or none is; write streaming: true for all of them",
        ),
        (
            {"source": STREAM, "split": {"type": "random"}},
            "data.split: a stream is not divided; remove split, and write validation for rows to validate on",
        ),
        (
            {"source": STREAM, "encode": "cache"},
            "data.encode: a stream is encoded while it is read; remove encode: cache, or streaming",
        ),
        (
            mix(STREAM, STREAM, encode="cache"),
            "data.encode: a stream is encoded while it is read; remove encode: cache, or streaming",
        ),
        (
            {"source": STREAM, "batching": {"type": "fixed", "drop_last": True}},
            (
                "data.batching.drop_last: a stream is cut into windows, and each would lose rows at its end; remove "
                "drop_last"
            ),
        ),
        (
            {"source": STREAM, "batching": {"type": "bucket", "longest_first": True}},
            "data.batching.longest_first: the longest row of a stream is not known; remove longest_first",
        ),
        (
            {"source": "a.jsonl", "split": {"type": "random", "probabilities": [0.9, 0.05, 0.06]}},
            "data.split.probabilities: probabilities sum to 1.01; write three shares with the sum 1",
        ),
        ({"formatter": "x"}, "data.formatter: got 'x'; write module:Class, such as my_package.parts:MyClass"),
        ({"collate": "x"}, "data.collate: got 'x'; write module:Class, such as my_package.parts:MyClass"),
        (
            {"source": {"type": "custom", "target": "x"}},
            "data.source.target: got 'x'; write module:Class, such as my_package.parts:MyClass",
        ),
    ],
)
def test_a_rule_of_the_data_section_is_reported_with_this_message(data: dict[str, Any], text: str) -> None:
    assert problems(data) == [text]


def test_a_mix_may_have_a_thousand_sources() -> None:
    assert problems(mix(*["a.csv"] * 1000)) == []


@pytest.mark.parametrize(
    ("data", "at"),
    [
        ({"source": STREAM}, "data.source.streaming"),
        (mix(STREAM, STREAM), "data.mix[0].source.streaming"),
    ],
)
def test_streams_are_refused_for_evaluation(data: dict[str, Any], at: str) -> None:
    reported = problems(data, trainer={"type": "none"})
    assert reported == [f"{at}: with trainer: {{type: none}} all rows are needed each time; remove streaming"]


def test_training_on_a_stream_needs_a_number_of_steps() -> None:
    reported = problems({"source": STREAM}, trainer={"type": "finetune"})
    assert reported == ["trainer: a stream has no known length; write max_steps, the number of optimizer steps"]


def test_a_number_of_epochs_is_refused_for_a_stream() -> None:
    reported = problems({"source": STREAM}, trainer=STEPS | {"epochs": 2})
    assert reported == ["trainer.epochs: a stream has no known length; remove epochs, max_steps says when the run ends"]


@pytest.mark.parametrize(
    ("key", "instead"),
    [("evaluations_per_epoch", "steps_per_evaluation"), ("checkpoints_per_epoch", "steps_per_checkpoint")],
)
def test_an_interval_per_epoch_is_refused_for_a_stream(key: str, instead: str) -> None:
    reported = problems({"source": STREAM}, trainer=STEPS | {key: 4})
    assert reported == [f"trainer.{key}: an epoch of a stream has no known length; remove {key}, and write {instead}"]


@pytest.mark.parametrize("batching", [{"type": "pack"}, {"type": "token_budget", "max_tokens": "auto"}])
def test_a_stream_needs_the_length_of_the_longest_row(batching: dict[str, Any]) -> None:
    data = {"source": STREAM, "batching": batching}
    (result,) = problems(data)
    assert result == (
        "data.batching: the longest row of a stream is not known; write max_tokens here, or "
        "preprocessing.global_max_sequence_length"
    )
    assert problems(data, preprocessing={"global_max_sequence_length": 100}) == []
    assert problems({**data, "batching": batching | {"max_tokens": 100}}) == []


def test_a_stream_needs_the_labels_in_the_configuration() -> None:
    outputs = [{"name": "c", "type": "text"}, {"name": "b", "type": "category"}]
    reported = problems({"source": STREAM}, output_features=outputs)
    assert reported == [
        "output_features[1].decoder.labels: the beginning of a stream need not show every label of b; write them here"
    ]
    outputs[1] |= {"decoder": {"labels": ["x", "y"]}}  # type: ignore[dict-item]
    assert problems({"source": STREAM}, output_features=outputs) == []


def test_retrieval_from_a_stream_is_refused() -> None:
    retrieval: dict[str, Any] = {"type": "random", "k": 1}
    reported = problems({"source": STREAM}, prompt={"retrieval": retrieval})
    assert reported == [
        "prompt.retrieval: examples are not retrieved from a stream; write dataset, the rows to retrieve from"
    ]
    assert problems({"source": STREAM}, prompt={"retrieval": retrieval | {"dataset": "a.csv"}}) == []


@pytest.mark.parametrize(("key", "value"), [("sample_ratio", 0.5), ("sample_size", 5), ("split", {"type": "random"})])
def test_settings_that_need_the_number_of_rows_are_refused_for_streams(key: str, value: Any) -> None:
    reported = problems({"source": STREAM}, preprocessing={key: value})
    assert reported == [f"preprocessing.{key}: {key} needs the number of rows, and a stream has none; remove it"]


def test_a_token_budget_with_a_batch_size_is_refused() -> None:
    data = {"batching": {"type": "token_budget", "max_tokens": 4096}}
    (result,) = problems(data, trainer=STEPS | {"batch_size": 8})
    assert result == (
        "trainer.batch_size: batch_size has no effect with data.batching: {type: token_budget}; write max_tokens or "
        "max_rows there"
    )
    assert problems(data) == []
    assert problems(data, trainer={"type": "none", "batch_size": 8}) == [], "of evaluation and prediction"


@pytest.mark.parametrize(
    "data",
    [
        {"source": STREAM},
        {"source": STREAM, "validation": "v.csv"},
        mix(STREAM, STREAM, stop="first"),
        mix("a.csv", {"type": "hub", "name": "x/y"}, stop="all_once"),
        {"source": {"type": "custom", "target": "p:C", "options": {"a": [1]}, "streaming": True}},
        {"source": "a.csv", "encode": "cache", "resume": "fresh", "max_bad_rows": 3},
        {"batching": {"type": "auto"}},
        {"batching": {"type": "fixed", "shuffle": False, "drop_last": True}},
        {"batching": {"type": "bucket", "noise": 0.1, "length_spread": 20, "longest_first": True, "drop_last": True}},
        {"batching": {"type": "token_budget", "max_tokens": "auto", "max_rows": 9, "multiple_of": 8}},
        {"batching": {"type": "pack", "max_tokens": 512, "window": 100}},
        {"loader": {"workers": 3, "prefetch": 1, "start_method": "spawn", "timeout": 5}},
        {"formatter": "my.parts:Shaper", "collate": "parts:Collate"},
    ],
)
def test_every_key_of_the_data_section_can_be_written(data: dict[str, Any]) -> None:
    assert problems(data) == []


@pytest.mark.parametrize(("max_rows", "fits"), [(9, True), (8, False), (3, False)])
def test_batches_are_rounded_only_if_they_may_have_more_rows(max_rows: int, fits: bool) -> None:
    batching = {"type": "token_budget", "max_rows": max_rows, "multiple_of": 8}
    message = (
        f"data.batching.multiple_of: multiple_of: 8 has no effect with max_rows: {max_rows}, because it rounds only "
        "batches of more rows; write a larger max_rows, or remove multiple_of"
    )
    assert problems({"batching": batching}) == ([] if fits else [message])
    assert problems({"batching": {**batching, "multiple_of": 1}}) == []


@pytest.mark.parametrize(("key", "value"), [("prefetch", 4), ("start_method", "spawn"), ("timeout", 5)])
def test_options_of_workers_need_workers(key: str, value: Any) -> None:
    message = f"data.loader.{key}: {key} has no effect without workers; write workers: 1 or more, or remove it"
    assert problems({"loader": {key: value}}) == [message]
    assert problems({"loader": {key: value, "workers": 1}}) == []
