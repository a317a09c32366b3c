"""Tests of ROUGE against the library rouge-score and a table of longest common subsequences."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.metrics.rouge import common_subsequence, ngram_f1, subsequence_f1

TEXTS = st.lists(st.sampled_from("abcd"), max_size=80)


class Split:
    def tokenize(self, text: str) -> list[str]:
        return text.split()


@pytest.fixture(scope="module")
def library() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rouge3", "rougeL"], tokenizer=Split())


@given(truth=TEXTS, answer=TEXTS)
def test_scores_are_those_of_the_library(library: Any, truth: list[str], answer: list[str]) -> None:
    found = {f"rouge{n}": ngram_f1(truth, answer, n) for n in (1, 2, 3)} | {"rougeL": subsequence_f1(truth, answer)}
    scores = library.score(" ".join(truth), " ".join(answer))
    assert found == {name: score.fmeasure for name, score in scores.items()}


@given(one=TEXTS, other=TEXTS)
def test_a_common_subsequence_is_as_long_as_in_the_usual_table(one: list[str], other: list[str]) -> None:
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for index, another in enumerate(other):
            row.append(before[index] + 1 if word == another else max(before[index + 1], row[index]))
    assert common_subsequence(one, other) == row[-1]


def test_one_word_each_has_no_pair_of_words() -> None:
    assert (ngram_f1(["a"], ["a"], 1), ngram_f1(["a"], ["a"], 2), subsequence_f1(["a"], ["a"])) == (1, 0, 1)
