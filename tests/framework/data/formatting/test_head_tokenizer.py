"""Tests of rows for a head: tokens are those of the tokenizer itself, and each row has its targets."""

from typing import Any

import pytest

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example
from partita.tokenizers.load import train_tokenizer
from partita_schema.config import Config
from partita_schema.errors import RowError
from partita_schema.sections.model import ScratchModel

LABELS = ("blue", "green", "red")
TEXT = "the cat sat on a mat"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer of an encoder, which puts special tokens around a text."""
    base = ScratchModel(type="scratch", architecture="bert", tokenizer="word", vocab_size=40)
    return train_tokenizer(base, [f"{TEXT} {' '.join(LABELS)} title : body \n"])


def make_config(kind: str = "category", **sections: Any) -> Config:
    output: dict[str, Any] = {"name": "label", "type": kind, "head": "linear"}
    base = {
        "base_model": "m",
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [output],
        "trainer": {"type": "finetune"},
    }
    return Config.model_validate(base | sections)


def encode(tokenizer: Any, row: dict[str, Any], *, limit: int | None = None, kind: str = "category", **sections: Any):
    labels = {} if kind == "number" else {"label": LABELS}
    row_tokenizer = build_row_tokenizer(
        make_config(kind, **sections), tokenizer=tokenizer, context_length=limit, labels=labels
    )
    [example] = row_tokenizer.encode_rows([row], ["k"])
    return row_tokenizer, example


@pytest.mark.parametrize("limit", [None, 8, 5, 3])
def test_tokens_are_those_of_the_tokenizer_also_when_truncated(tokenizer: Any, limit: int | None) -> None:
    row = {"text": TEXT, "label": "green"}
    row_tokenizer, example = encode(tokenizer, row, limit=limit)

    whole = tokenizer(TEXT)["input_ids"]
    wanted = tokenizer(TEXT, truncation=limit is not None, max_length=limit)["input_ids"]
    prompt = row_tokenizer.encode_prompt({"text": TEXT}, key="k")
    assert example.input_ids == wanted == prompt.input_ids
    assert example.cut_tokens == prompt.cut_tokens == len(whole) - len(wanted)
    assert example.spans == ((len(wanted) - 1, len(wanted)),)


@pytest.mark.parametrize(
    ("kind", "value", "targets"),
    [
        ("category", "green", (1.0,)),
        ("set", ["red", "blue"], (1.0, 0.0, 1.0)),
        ("set", [], (0.0, 0.0, 0.0)),
        ("number", 7, (7.0,)),
    ],
    ids=["category", "set", "empty set", "number"],
)
def test_targets_are_indices_members_or_numbers(
    tokenizer: Any, kind: str, value: Any, targets: tuple[float, ...]
) -> None:
    _, example = encode(tokenizer, {"text": TEXT, "label": value}, kind=kind)

    assert example.targets == (targets,)


TWO = [{"name": "text", "type": "text"}, {"name": "other", "type": "text"}]


@pytest.mark.parametrize(
    ("output", "sections", "value"),
    [
        ({"type": "score"}, {"input_features": TWO}, 1),
        ({"type": "embedding"}, {}, "a mat"),
    ],
    ids=["score", "embedding"],
)
def test_tokens_beyond_the_context_are_counted_in_prediction_as_in_training(
    tokenizer: Any, output: dict[str, Any], sections: dict[str, Any], value: Any
) -> None:
    config = make_config(**sections, output_features=[{"name": "label", **output}])
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=6, labels={"label": LABELS})
    row = {"text": TEXT, "other": "the cat", "label": value}
    [example] = row_tokenizer.encode_rows([row], ["k"])
    assert isinstance(example, Example)
    assert row_tokenizer.encode_prompt(row, key="k").cut_tokens == example.cut_tokens > 0


def test_several_inputs_are_lines_without_a_line_break_at_the_end(tokenizer: Any) -> None:
    inputs = [{"name": "title", "type": "text"}, {"name": "body", "type": "text"}]
    row = {"title": "the cat", "body": "on a mat", "label": "red"}
    _, example = encode(tokenizer, row, input_features=inputs)

    assert example.input_ids == tokenizer("title: the cat\nbody: on a mat")["input_ids"]


def test_a_template_writes_the_text(tokenizer: Any) -> None:
    _, example = encode(tokenizer, {"text": "cat", "label": "red"}, prompt={"template": "the {text} sat"})

    assert example.input_ids == tokenizer("the cat sat")["input_ids"]


def test_a_chat_template_is_not_applied(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for message in messages %}on {{ message['content'] }}{% endfor %}"
    try:
        row_tokenizer, example = encode(tokenizer, {"text": TEXT, "label": "red"})
    finally:
        tokenizer.chat_template = None

    assert not row_tokenizer.formatter.chat
    assert example.input_ids == tokenizer(TEXT)["input_ids"]


def test_an_unknown_label_is_a_bad_row(tokenizer: Any) -> None:
    for kind, value in (("category", "pink"), ("set", ["red", "pink"])):
        _, example = encode(tokenizer, {"text": TEXT, "label": value}, kind=kind)
        assert isinstance(example, RowError)
        assert str(example) == "column label: 'pink' is none of the labels blue, green, red"


def test_text_that_is_not_unicode_is_a_bad_row(tokenizer: Any) -> None:
    row_tokenizer, example = encode(tokenizer, {"text": "half \ud800", "label": "red"})

    assert str(example) == "not Unicode: half of a surrogate pair"
    good = {"text": TEXT, "label": "red"}
    assert isinstance(row_tokenizer.encode_rows([{"text": "\ud800", "label": "red"}, good], ["a", "b"])[1], Example)


def test_the_order_of_labels_changes_what_is_cached(tokenizer: Any) -> None:
    inputs = [
        build_row_tokenizer(
            make_config(), tokenizer=tokenizer, context_length=None, labels={"label": labels}
        ).fingerprint_inputs()
        for labels in (LABELS, LABELS[::-1])
    ]

    assert {name for name in inputs[0] if inputs[0][name] != inputs[1][name]} == {"labels of the head"}
