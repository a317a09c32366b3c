"""Tests of the output type set: values in rows, configuration, and targets."""

from typing import Any

import numpy as np
import pytest
from marshmallow import ValidationError

from partita_schema.config import Config
from partita_schema.load import load_config
from partita_schema.rows import reasons, row_schema
from partita_schema.sections.outputs import OUTPUT_MODELS

from ..refusals import problems_of


def raw(preprocessing: dict[str, Any] | None = None, **decoder: Any) -> dict[str, Any]:
    output = {"name": "tags", "type": "set", "decoder": decoder, "preprocessing": preprocessing or {}}
    return {"base_model": "m", "input_features": [{"name": "q"}], "output_features": [output]}


def config_of(preprocessing: dict[str, Any] | None = None, **decoder: Any) -> Config:
    return load_config(raw(preprocessing, **decoder)).config


def labels_of(value: Any, preprocessing: dict[str, Any] | None = None, **decoder: Any) -> Any:
    """Return the labels of a cell, or the reason why there are none."""
    try:
        return row_schema(config_of(preprocessing, **decoder), supervised=True).load({"q": "x", "tags": value})["tags"]
    except ValidationError as error:
        (reason,) = reasons(error)
        return reason


@pytest.mark.parametrize(
    "value",
    [
        ["b", "a c"],
        ("b", "a c", "b"),
        pytest.param({"a c", "b"}, id="set"),  # a set has no order, and test ids must be equal in all processes
        np.array(["b", "a c"]),
        "b,a c",
        " b , a c, ",
        '["b", "a c"]',
    ],
    ids=repr,
)
def test_lists_and_text_are_read_as_sets_in_the_order_of_the_labels(value: object) -> None:
    assert labels_of(value, labels=["b", "a c", "d"]) == ["b", "a c"]
    assert labels_of(value) == ["a c", "b"], "without labels they are sorted"


def test_cells_may_have_another_separator_numbers_or_no_label() -> None:
    assert labels_of("a|b", {"separator": "|"}) == ["a", "b"]
    assert labels_of("a, b|c", {"separator": "|"}) == ["a, b", "c"]
    assert labels_of([2, 1.0, "x"]) == ["1", "2", "x"]
    assert labels_of(7) == ["7"]
    assert labels_of([]) == []
    assert labels_of("[]") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a, c", "column tags: 'c' is none of the labels a, b"),
        (["a", "A"], "column tags: 'A' is none of the labels a, b"),
        (
            "a;b",
            (
                "column tags: 'a;b' is none of the labels a, b; if 'a;b' is several labels, write preprocessing: "
                "{separator: ';'}"
            ),
        ),
        ("c;d", "column tags: 'c;d' is none of the labels a, b"),
        (["a", ["b"]], "column tags: ['b'] is not text"),
        ({"a": 1}, "column tags: {'a': 1} is not text"),
        (True, "column tags: 'true' is none of the labels a, b"),
        ('["a"', "column tags: '[\"a\"' is not JSON (Expecting ',' delimiter: line 1 column 5 (char 4))"),
        ("", "column tags is missing or empty"),
        (None, "column tags is missing or empty"),
    ],
)
def test_a_value_that_is_not_a_set_of_the_labels_is_reported(value: object, reason: str) -> None:
    assert labels_of(value, labels=["a", "b"]) == reason


def test_nested_lists_of_any_depth_are_reported() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert labels_of(endless) == "column tags: [[...]] is not text"
    assert labels_of(deep) == "column tags: a list is not text"
    assert labels_of("[" * 100_000).startswith("column tags: the value is nested more than 100 levels deep")


def test_missing_values_are_filled_with_labels_or_with_no_label() -> None:
    filled = {"missing_value_strategy": "fill_with_const"}
    assert labels_of(None, filled) == []
    assert labels_of(None, filled | {"fill_value": "a, b"}) == ["a", "b"]


def test_a_label_with_a_comma_is_refused_in_the_comma_format() -> None:
    reason = "the label 'a, b' contains a comma, which separates labels; write preprocessing: {format: json}"
    assert labels_of(["a, b"], {"format": "comma"}) == f"column tags: {reason}"
    assert labels_of(["a, b"], {"format": "json"}) == ["a, b"]


@pytest.mark.parametrize(("form", "text"), [("json", '["a","b \\"c\\""]'), ("comma", 'a, b "c"')])
def test_targets_are_written_in_the_format(form: str, text: str) -> None:
    output = config_of({"format": form}).output_features[0]
    assert output.answer_text(["a", 'b "c"']) == text
    assert output.answer_text([]) == ("[]" if form == "json" else "")


LABELS_AT = "output_features[0].decoder.labels"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], f"{LABELS_AT}: the list is empty; write at least 1 of them"),
        (["a", "b", "a"], f"{LABELS_AT}: labels holds 'a' twice; write each label once"),
        (
            ["a", "b "],
            f"{LABELS_AT}: the label 'b ' begins or ends with a space, which is removed in rows and answers; write 'b'",
        ),
        (["a", " "], f"{LABELS_AT}: a label is blank; remove it, an empty set needs no label"),
        (["a", ""], f"{LABELS_AT}[1]: the text is empty; write a text"),
        (
            ["a,b"],
            (
                f"{LABELS_AT}: the label 'a,b' contains a comma, which separates labels; write preprocessing: "
                "{format: json} or rename the label"
            ),
        ),
    ],
)
def test_indistinguishable_labels_are_refused(labels: list[str], message: str) -> None:
    assert problems_of(raw({"format": "comma"}, labels=labels)) == [message]


def test_a_label_with_a_comma_may_be_an_item_of_an_array() -> None:
    assert config_of({"format": "json"}, labels=["a,b"]).output_features[0].labels == ("a,b",)


def test_types_of_other_libraries_for_several_labels_are_recognized() -> None:
    file = raw()
    file["output_features"][0]["type"] = "multilabel"
    assert problems_of(file) == ["output_features[0].type: got multilabel; write type: set"]


def test_a_stream_needs_the_labels_of_a_set_in_the_configuration() -> None:
    source = {"type": "jsonl", "path": "rows.jsonl", "streaming": True}
    data = {"source": source, "batching": {"type": "fixed"}}
    file = raw() | {"data": data, "trainer": {"type": "finetune", "max_steps": 1, "batch_size": 1}}
    assert problems_of(file) == [
        f"{LABELS_AT}: the beginning of a stream need not show every label of tags; write them here"
    ]


def test_sets_are_constrained_like_json_and_together_with_json() -> None:
    assert problems_of(raw(constrain=True)) == []
    assert problems_of(raw(constrain=True, labels=["a", "b"])) == []
    file = raw(labels=["a"])
    file["output_features"].append({"name": "more", "type": "json", "decoder": {"constrain": True}})
    (message,) = problems_of(file)
    assert message == (
        "output_features[0].decoder.constrain: several outputs are one JSON object, which is constrained as a whole; "
        "write constrain: true for each set output, or for none"
    )
    file = raw(constrain=True) | {"backend": {"type": "endpoint", "url": "http://localhost:8000/v1"}}
    (message,) = problems_of(file)
    assert message == (
        "output_features[0].decoder.constrain: a server constrains its answers itself; remove it, and write "
        "response_format or the like in backend.extra_body"
    )


def test_a_bag_of_words_with_a_set_is_refused() -> None:
    file = raw(labels=["a"]) | {"base_model": {"type": "embedding_bag"}, "trainer": {"type": "hogwild"}}
    assert (
        "output_features[0].type: a bag of words chooses a label, and this is a set; write type: category, or a "
        "language model as base_model"
    ) in problems_of(file)


@pytest.mark.parametrize("model", OUTPUT_MODELS, ids=lambda model: model.__name__)
def test_every_output_type_lists_its_metrics(model: Any) -> None:
    assert model.METRICS
    assert set(model.METRICS.values()) <= {"lower", "higher"}
