"""Tests of words and their tags."""

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.cells import CellError
from partita_schema.words import Span, WordText, read_tags, read_words, tags_of, word_spans


def words(text: str, **options: Any) -> list[str]:
    return read_words(text, **{"splitting": "punctuation", **options}).words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Anna lives in Oslo.", ["Anna", "lives", "in", "Oslo", "."]),
        ("  don't\tstop  ", ["don", "'", "t", "stop"]),
        ("x_1 = 3.5%", ["x_1", "=", "3", ".", "5", "%"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("東京タワー OK", ["東", "京", "タ", "ワ", "ー", "OK"]),
    ],
)
def test_a_text_is_split_at_white_space_and_punctuation(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_with_whitespace_punctuation_belongs_to_words() -> None:
    assert words(" the U.S. economy. ", splitting="whitespace") == ["the", "U.S.", "economy."]


@pytest.mark.parametrize(
    "cell", [["New York", "is", "big"], np.array(["New York", "is", "big"]), '["New York","is","big"]']
)
def test_a_list_is_words_already(cell: Any) -> None:
    text = read_words(cell, splitting="punctuation")
    assert text == "New York is big"
    assert text.words == ["New York", "is", "big"]


def test_a_text_that_begins_like_a_list_is_a_text() -> None:
    assert words("[sic] it is") == ["[", "sic", "]", "it", "is"]


def test_lower_case_is_applied_to_words() -> None:
    assert words("In Oslo", lowercase=True) == ["in", "oslo"]
    assert read_words(["In", "Oslo"], splitting="whitespace", lowercase=True).words == ["in", "oslo"]


@pytest.mark.parametrize(
    ("cell", "reason"), [([], "there are no words"), (["a", " "], "word 2 is blank"), ("\u200b ", None)]
)
def test_rows_without_words_are_refused(cell: Any, reason: str | None) -> None:
    if reason is None:
        assert words(cell) == ["\u200b"]
        return
    with pytest.raises(CellError, match=f"^{reason}$"):
        read_words(cell, splitting="punctuation")


@given(st.text())
def test_words_cover_all_visible_characters_in_order(text: str) -> None:
    for splitting in ("punctuation", "whitespace"):
        spans = list(word_spans(text, splitting=splitting))
        assert "".join(text[start:end] for start, end in spans) == "".join(text.split())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_words_survive_a_process_boundary() -> None:
    text = pickle.loads(pickle.dumps(read_words(["a b", "c"], splitting="whitespace")))
    assert (text, text.words) == ("a b c", ["a b", "c"])


TEXT = "Anna Berg lives in Oslo."
SPANS = [{"start": 19, "end": 23, "label": "LOC"}, {"start": 0, "end": 9, "label": "PER"}]


def tagged(cell: Any, text: Any = TEXT, labels: Any = None) -> list[str]:
    words_of_text = read_words(text, splitting="punctuation")
    return tags_of(words_of_text, read_tags(cell, labels=labels), splitting="punctuation")


@pytest.mark.parametrize(
    "cell",
    [SPANS, [[0, 9, "PER"], (19, 23, "LOC")], '[{"start": 0, "end": 9, "label": "PER"}, [19, 23, "LOC"]]'],
    ids=["objects", "lists", "json"],
)
def test_spans_of_characters_become_tags_of_words(cell: Any) -> None:
    assert tagged(cell) == ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]


def test_a_word_that_a_span_ends_in_has_its_label_and_is_noted() -> None:
    tags = tagged([[2, 6, "PER"], [19, 23, "LOC"]])
    assert tags[:3] == ["B-PER", "I-PER", "O"]
    assert tags.widened == ("'na B' in 'Anna Berg'",)
    assert tagged([[0, 10, "PER"]]).widened == ()  # a space after the last word


@pytest.mark.parametrize("cell", ["O B-PER", ["O", "B-PER"], '["O", "B-PER"]', [0, 1], np.array([0, 1])], ids=repr)
def test_tags_are_a_list_a_text_or_indices_of_the_labels(cell: Any) -> None:
    assert tagged(cell, text=["the", "Anna"], labels=("O", "B-PER")) == ["O", "B-PER"]


def test_an_empty_list_is_no_entities() -> None:
    assert tagged([]) == ["O"] * 6


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (["O"], "1 tag for 6 words"),
        (["O"] * 5, "5 tags for 6 words; write preprocessing: {words: whitespace}, or the words as a list"),
        ([[3, 40, "PER"]], "the span from 3 to 40 is not in the text of 24 characters"),
        ([[4, 5, "PER"]], "the span from 4 to 5 holds no word"),
        (
            [[0, 4, "PER"], [2, 9, "LOC"]],
            "the span from 2 to 9 has a word in common with another span; a word has one tag",
        ),
        (
            [{"start": 1, "label": "PER"}],
            "the span {'start': 1, 'label': 'PER'} has no end; write start, end and label",
        ),
        ([[0, "4", "PER"]], "[0, '4', 'PER'] is not a span; write {start: 0, end: 4, label: NAME}"),
        ([0, 1], "the tag 0 is an index of labels; write them as decoder: {labels: [...]}"),
        ([None], "None is not a tag"),
        (7, "7 is not a list of tags, nor of spans"),
    ],
)
def test_wrong_tags_are_refused_with_the_reason(cell: Any, reason: str) -> None:
    with pytest.raises(CellError) as caught:
        tagged(cell)
    assert str(caught.value) == reason


def test_an_index_that_is_no_label_is_refused() -> None:
    with pytest.raises(CellError, match="the tag 2 is not an index of the 2 labels"):
        read_tags([2], labels=("O", "B"))


def test_a_span_is_a_tuple_of_start_end_and_label() -> None:
    assert read_tags(SPANS, labels=None) == [Span(19, 23, "LOC"), Span(0, 9, "PER")]
    assert WordText("a b", [(0, 1), (2, 3)]).words == ["a", "b"]
