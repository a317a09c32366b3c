import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.base import ReadError
from partita.outputs.types.category import LabelReader
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


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("\u22121", "-1"),
        ("\u20131", "-1"),
        ("- 1", "-1"),
        ("The label is \u22121.", "-1"),
        ("+1", "1"),
        ("class-1", "1"),
        ("It is 1, not more.", "1"),
        ("(0)", "0"),
    ],
)
def test_a_label_that_is_a_number_is_read_with_its_sign(text: str, label: str) -> None:
    assert LabelReader(["-1", "0", "1"]).read(text) == label


@pytest.mark.parametrize("text", ["-1", "\u22121", "- 1", "0.99", "0,9", "-0.2", ".1", "10", "2+1", "0-1"])
def test_a_label_inside_a_longer_number_does_not_match(text: str) -> None:
    with pytest.raises(ReadError, match="no label in"):
        LabelReader(["0", "1"]).read(text)


@pytest.mark.parametrize(
    "text", ["non\u2011toxic", "Non\u2013toxic", "Non toxic.", "It is non\ntoxic", "it is non-toxic"]
)
@pytest.mark.parametrize("label", ["non-toxic", "non toxic", "non\u2011toxic"])
def test_a_label_of_several_words_has_any_hyphen_or_a_space(text: str, label: str) -> None:
    assert LabelReader(["toxic", label]).read(text) == label


def test_labels_that_differ_only_in_hyphens_are_distinguished() -> None:
    reader = LabelReader(["re-sign", "re sign", "5-10"])
    assert [reader.read(text) for text in ("Re-sign", "please re sign", "5\u201310")] == ["re-sign", "re sign", "5-10"]
    with pytest.raises(ReadError, match="no label"):
        reader.read("5 10")


def test_letters_match_in_each_encoding_of_their_accents() -> None:
    for label in ("caf\u00e9", "cafe\u0301"):
        reader = LabelReader([label, "bar"], rules={"bar": rule(value="th\u00e9")})
        assert [reader.read(text) for text in ("Cafe\u0301", "un caf\u00e9.", "the\u0301")] == [label, label, "bar"]


def test_a_long_answer_with_many_labels_is_read_in_a_moment() -> None:
    start = time.process_time()
    with pytest.raises(ReadError, match="several labels"):
        LabelReader(["cat", "dog"]).read("cat dog " * 20_000)
    assert time.process_time() - start < 5


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


def test_a_rule_takes_hyphens_as_they_are_written() -> None:
    reader = LabelReader(["minus", "other"], rules={"minus": rule(value="- 1"), "other": rule(value="\u2013")})
    assert [reader.read(text) for text in ("- 1", "a - 1", "-1 \u2013")] == ["minus", "minus", "other"]
    with pytest.raises(ReadError, match="no label"):
        reader.read("-1")


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
