from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.base import ReadError
from partita.outputs.category import LabelReader
from partita_schema.sections.outputs.category import Match


def rule(**values: Any) -> Match:
    return Match.model_validate(values)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("positive", "positive"),
        ("  Positive.\n", "positive"),
        ("**negative**", "negative"),
        ("The sentiment is Negative, clearly.", "negative"),
        ("positive, yes, positive", "positive"),
        ("\u201cneutral\u201d", "neutral"),
    ],
)
def test_an_answer_is_the_label_it_equals_or_the_only_one_it_contains(text: str, label: str) -> None:
    assert LabelReader(["positive", "negative", "neutral"]).read(text) == label


def test_a_label_inside_a_word_does_not_match() -> None:
    with pytest.raises(ReadError, match="no label in 'the cathedral'"):
        LabelReader(["cat", "dog"]).read("the cathedral")


def test_several_labels_in_an_answer_are_an_error() -> None:
    with pytest.raises(ReadError, match="several labels in 'a cat and a dog': cat, dog"):
        LabelReader(["cat", "dog"]).read("a cat and a dog")


def test_a_longer_label_takes_precedence_over_a_label_inside_it() -> None:
    reader = LabelReader(["good", "not good", "very good"])
    assert reader.read("It is not good.") == "not good"
    assert reader.read("good enough") == "good"


def test_a_short_label_that_also_occurs_alone_is_a_second_label() -> None:
    with pytest.raises(ReadError, match="several labels"):
        LabelReader(["good", "not good"]).read("not good, no: good")


def test_labels_that_differ_only_in_case_are_distinguished() -> None:
    reader = LabelReader(["US", "us"])
    assert (reader.read("it is the US."), reader.read("us")) == ("US", "us")


def test_labels_that_end_in_punctuation_are_found() -> None:
    reader = LabelReader(["C", "C++", "C#"])
    assert [reader.read(text) for text in ("written in C++.", "written in C", "it is c#")] == ["C++", "C", "C#"]


def test_labels_in_a_script_without_spaces_are_found() -> None:
    assert LabelReader(["正面", "负面"]).read("这条评论是正面的") == "正面"


def test_rules_are_tried_in_their_order() -> None:
    rules = {
        "refund": rule(type="contains", value="Money Back"),
        "order": rule(type="regex", value=r"order\s+#?\d+"),
        "yes": rule(type="exact", value="Y"),
    }
    reader = LabelReader(["refund", "order", "yes", "other"], rules=rules)
    assert reader.read("I want my money back for ORDER 12") == "refund"
    assert reader.read("where is Order #12?") == "order"
    assert reader.read(" y ") == "yes"


def test_a_label_without_a_rule_uses_the_default_rule() -> None:
    reader = LabelReader(["refund", "other"], rules={"refund": rule(value="money")})
    assert reader.read("something other") == "other"


def test_a_label_with_a_rule_uses_only_its_rule() -> None:
    with pytest.raises(ReadError, match="no label"):
        LabelReader(["refund"], rules={"refund": rule(value="money")}).read("refund")


def test_the_fallback_is_used_for_no_label_and_for_several() -> None:
    reader = LabelReader(["cat", "dog"], fallback="dog")
    assert (reader.read("fish"), reader.read("cat or dog"), reader.read("a cat")) == ("dog", "dog", "cat")


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.text())
def test_any_text_gives_a_label_or_a_reason(labels: list[str], text: str) -> None:
    reader = LabelReader(labels)
    try:
        label = reader.read(text)
    except ReadError:
        with pytest.raises(ReadError, match="label"):
            reader.read(text)
        label = LabelReader(labels, fallback=labels[0]).read(text)
    assert label in labels


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.data())
def test_every_label_is_read_as_itself(labels: list[str], data: st.DataObject) -> None:
    label = data.draw(st.sampled_from(labels))
    stripped = [other for other in labels if other.strip() == label.strip()]
    assert LabelReader(labels).read(label) in stripped
