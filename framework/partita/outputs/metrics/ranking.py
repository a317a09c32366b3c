"""Metrics of rankings: the mean reciprocal rank, and the normalized discounted cumulative gain.

Equal scores are ties: a metric is its mean over all orders of the tied documents, as in scikit-learn (McSherry and
Najork 2008), so that it does not depend on the order of the rows.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby

from partita.outputs.base import exact_sum

DEPTH = 10
"""Documents of a query that the gain is computed over."""
Document = tuple[float, float]
"""Score and relevance of a document."""


class Rankings:
    """Accumulates documents by query: 16 bytes for each."""

    def __init__(self) -> None:
        self._scores: dict[bytes, array[float]] = {}
        self._relevances: dict[bytes, array[float]] = {}

    def add(self, query: bytes, *, score: float, relevance: float) -> None:
        """Add a document.

        Args:
            query: Key of the query.
            score: Predicted score; minus infinity without an answer.
            relevance: True relevance; a document above 0 is relevant.
        """
        self._scores.setdefault(query, array("d")).append(score)
        self._relevances.setdefault(query, array("d")).append(relevance)

    def results(self) -> dict[str, float]:
        """Return `mrr`, `ndcg_at_10` and `queries`, the number of queries with a relevant document.

        Queries without a relevant document have no rank, and are not part of the means. Both are NaN without queries.
        """
        rankings = [self._ranking(query) for query in self._scores if max(self._relevances[query]) > 0]
        count = len(rankings)
        return {
            "mrr": exact_sum(map(reciprocal_rank, rankings)) / count if count else math.nan,
            "ndcg_at_10": exact_sum(map(normalized_gain, rankings)) / count if count else math.nan,
            "queries": float(count),
        }

    def _ranking(self, query: bytes) -> list[Document]:
        """Return the documents of a query, the highest score first."""
        return sorted(zip(self._scores[query], self._relevances[query], strict=True), reverse=True)


def reciprocal_rank(ranking: Sequence[Document]) -> float:
    """Return the reciprocal of the rank of the first relevant document, of which there is one.

    Args:
        ranking: Documents, the highest score first.
    """
    for start, tied in ties(ranking):
        relevant = sum(relevance > 0 for relevance in tied)
        if relevant:
            return exact_sum(
                share / (start + place) for place, share in enumerate(first_places(len(tied), relevant), start=1)
            )
    raise AssertionError("a ranking has a relevant document")


def first_places(count: int, relevant: int) -> Iterator[float]:
    """Yield for each place in a tie the share of orders in which the first relevant document has it.

    Args:
        count: Number of documents.
        relevant: How many of them are relevant.
    """
    none_before = 1.0
    for left in range(count, relevant - 1, -1):
        yield none_before * relevant / left
        none_before *= (left - relevant) / left


def normalized_gain(ranking: Sequence[Document]) -> float:
    """Return the discounted cumulative gain of the first `DEPTH` ranks, divided by that of the best order.

    Järvelin and Kekäläinen 2002. The gain of a document is its relevance, or 0 if that is negative, so that the result
    is between 0 and 1. The discount of rank i is log2(i + 1).

    Args:
        ranking: Documents, the highest score first; at least one is relevant.
    """
    best = sorted((gain_of(relevance) for _, relevance in ranking), reverse=True)
    ideal = exact_sum(gain * discount(rank) for rank, gain in enumerate(best[:DEPTH], start=1))
    gains = []
    for start, tied in ties(ranking):
        mean = exact_sum(map(gain_of, tied)) / len(tied)
        gains += [mean * discount(rank) for rank in range(start + 1, min(start + len(tied), DEPTH) + 1)]
    return exact_sum(gains) / ideal


def gain_of(relevance: float) -> float:
    """Return the gain of a document of this relevance."""
    return max(0.0, relevance)


def discount(rank: int) -> float:
    """Return the weight of a rank, from 1."""
    return 1 / math.log2(rank + 1)


def ties(ranking: Sequence[Document]) -> Iterator[tuple[int, list[float]]]:
    """Yield the relevances of documents with equal scores, and the number of documents before them."""
    start = 0
    for _, group in groupby(ranking, key=lambda document: document[0]):
        tied = [relevance for _, relevance in group]
        yield start, tied
        start += len(tied)
