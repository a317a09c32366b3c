import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.metrics.ranking import Document, Rankings, normalized_gain, reciprocal_rank

documents = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([0.0, 1.0, 3.0])), max_size=5)


def results(*rows: tuple[str, float, float]) -> dict[str, float]:
    """Return the metrics of rows of a query, a score and a relevance."""
    rankings = Rankings()
    for query, score, relevance in rows:
        rankings.add(query.encode(), score=score, relevance=relevance)
    return rankings.results()


def test_ranks_are_those_within_a_query() -> None:
    """The relevant document is first for query a, third for query b."""
    rows = [("a", 0.9, 1.0), ("b", 0.9, 0.0), ("b", 0.8, 0.0), ("b", 0.2, 1.0), ("a", 0.1, 0.0)]
    assert results(*rows) == {
        "mrr": (1 + 1 / 3) / 2,
        "ndcg_at_10": (1 + 1 / math.log2(4)) / 2,
        "queries": 2.0,
    }


def test_a_query_without_a_relevant_document_does_not_count() -> None:
    assert results(("a", 0.9, 1.0), ("b", 0.9, 0.0)) == {"mrr": 1.0, "ndcg_at_10": 1.0, "queries": 1.0}
    none = results(("b", 0.9, 0.0))
    assert math.isnan(none["mrr"])
    assert math.isnan(none["ndcg_at_10"])
    assert none["queries"] == 0


def test_a_document_without_a_score_is_last() -> None:
    assert results(("a", -math.inf, 1.0), ("a", -5.0, 0.0))["mrr"] == 1 / 2


def test_documents_from_rank_eleven_on_have_no_gain() -> None:
    rows = [("a", -float(rank), float(rank == 11)) for rank in range(1, 15)]
    assert results(*rows) == {"mrr": 1 / 11, "ndcg_at_10": 0.0, "queries": 1.0}


def test_the_gain_equals_scikit_learns_with_ties() -> None:
    from sklearn.metrics import ndcg_score

    dice = random.Random(1)
    for _ in range(50):
        rows = [(float(dice.randint(0, 6)), float(dice.choice([0, 0, 1, 2]))) for _ in range(15)]
        if any(relevance for _, relevance in rows):
            scores, relevances = zip(*rows, strict=True)
            expected = ndcg_score([relevances], [scores], k=10)
            assert normalized_gain(sorted(rows, reverse=True)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("negative", [-5.0, -math.log2(3)])
def test_a_document_with_a_negative_relevance_has_no_gain(negative: float) -> None:
    rows = [("a", 9.0, 1.0), *(("a", -float(rank), negative) for rank in range(9))]
    assert results(*rows)["ndcg_at_10"] == 1.0
    last = [("a", score, relevance) for (_, score, _), (_, _, relevance) in zip(rows, rows[::-1], strict=True)]
    assert results(*last)["ndcg_at_10"] == pytest.approx(1 / math.log2(11))
    assert results(("a", 1.0, negative), ("a", 1.0, 1.0))["ndcg_at_10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)


@given(documents)
def test_ties_count_as_the_mean_over_all_orders(rows: list[Document]) -> None:
    if not any(relevance for _, relevance in rows):
        return
    ranks = []
    for order in itertools.permutations(rows):
        ranking = sorted(order, key=lambda row: -row[0])  # stable: the order decides within ties
        ranks.append(1 / next(rank for rank, (_, relevance) in enumerate(ranking, start=1) if relevance))
    assert reciprocal_rank(sorted(rows, reverse=True)) == pytest.approx(fmean(ranks))


def test_many_documents_can_be_tied() -> None:
    """With one relevant document among n, the mean of 1 / rank is the n-th harmonic number divided by n."""
    rows = [(0.0, float(index == 0)) for index in range(3000)]
    assert reciprocal_rank(rows) == pytest.approx(sum(1 / rank for rank in range(1, 3001)) / 3000)


@given(documents, st.randoms())
def test_the_order_of_the_rows_makes_no_difference(rows: list[Document], dice: random.Random) -> None:
    named = [("ab"[index % 2], *row) for index, row in enumerate(rows)]
    mixed = dice.sample(named, len(named))
    assert str(results(*named)) == str(results(*mixed))
