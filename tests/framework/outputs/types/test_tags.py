import itertools
from typing import Any

import pytest

from partita.outputs.base import ReadError
from partita.outputs.types.tags import TagsMetrics, TagsReader

TRUTHS = [
    ["B-PER", "I-PER", "O", "B-LOC"],
    ["O", "O"],
    ["I-ORG", "I-ORG", "O", "B-ORG", "I-ORG"],
    ["B-PER", "B-PER"],
    ["B-LOC", "E-LOC", "S-LOC", "O"],
]
ANSWERS: list[Any] = [
    ["B-PER", "O", "O", "B-LOC"],
    ["O", "I-MISC"],
    ["B-ORG", "I-ORG", "O", "I-ORG", "I-PER"],
    ["B-PER", "I-PER"],
    ["B-LOC", "E-LOC", "B-LOC", "O"],
]


def results(truths: list[list[str]], answers: list[Any]) -> dict[str, float]:
    metrics = TagsMetrics()
    for truth, answer in zip(truths, answers, strict=True):
        metrics.add(truth, answer, valid=answer is not None)
    return metrics.results(len(truths))


def test_the_metrics_of_entities_equal_seqevals() -> None:
    """The expected values were computed with seqeval 1.2.2 in its default mode."""
    assert results(TRUTHS, ANSWERS) == {
        "exact_match": 0,
        "micro_precision": pytest.approx(0.4444444444444444),
        "micro_recall": 0.5,
        "micro_f1": pytest.approx(0.47058823529411764),
        "macro_f1": 0.375,
        "word_accuracy": pytest.approx(0.5882352941176471),
    }


def test_the_metrics_of_each_type_equal_seqevals() -> None:
    metrics = TagsMetrics()
    for truth, answer in zip(TRUTHS, ANSWERS, strict=True):
        metrics.add(truth, answer, valid=True)
    assert metrics.details()["per_label"] == {
        "LOC": {"precision": 1, "recall": 1, "f1": 1, "support": 3},
        "MISC": {"precision": 0, "recall": 0, "f1": 0, "support": 0},
        "ORG": {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2},
        "PER": {"precision": 0, "recall": 0, "f1": 0, "support": 3},
    }


def test_the_order_of_the_rows_makes_no_difference() -> None:
    pairs = list(zip(TRUTHS, ANSWERS, strict=True))
    expected = results(TRUTHS, ANSWERS)
    for order in itertools.permutations(pairs):
        truths, answers = map(list, zip(*order, strict=True))
        assert results(truths, answers) == expected


def test_words_without_a_prediction_are_in_no_entity() -> None:
    """The answer covers one of three words, as if the others were beyond the context."""
    result = results([["B-A", "O", "B-A"]], [["B-A"]])
    assert (result["micro_precision"], result["micro_recall"], result["word_accuracy"]) == (
        1,
        0.5,
        pytest.approx(2 / 3),
    )


def test_a_row_without_an_answer_misses_all_words_and_entities() -> None:
    result = results([["O", "B-A"], ["O", "B-A"]], [["O", "B-A"], None])
    assert result == {
        "exact_match": 0.5,
        "micro_precision": 1,
        "micro_recall": 0.5,
        "micro_f1": pytest.approx(2 / 3),
        "macro_f1": pytest.approx(2 / 3),
        "word_accuracy": 0.5,
    }


def test_without_any_entity_the_scores_are_the_share_of_right_rows() -> None:
    result = results([["O"], ["O", "O"]], [["O"], None])
    assert (result["micro_f1"], result["macro_f1"], result["exact_match"]) == (0.5, 0.5, 0.5)


def test_parts_of_speech_have_an_f1_for_each_tag() -> None:
    result = results([["DET", "NOUN", "NOUN"]], [["DET", "NOUN", "VERB"]])
    assert result["word_accuracy"] == result["micro_recall"] == pytest.approx(2 / 3)
    assert result["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("O O", "not a JSON array of tags: 'O O'"),
        ("7", "not a JSON array of tags: '7'"),
        ('["O", "X"]', "'X' is not a tag"),
        ('["O", 3]', "'3' is not a tag"),
    ],
)
def test_an_answer_that_is_no_list_of_tags_is_unreadable(text: str, reason: str) -> None:
    with pytest.raises(ReadError) as caught:
        TagsReader(["O", "B-A"]).read(text)
    assert str(caught.value) == reason
    assert TagsReader(["O", "B-A"]).read('["O", "B-A"]') == ["O", "B-A"]
