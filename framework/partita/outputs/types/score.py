"""The output type score: how well two texts fit each other, predicted by a head."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from partita.data.rows import digest
from partita.outputs.base import HeadOutputType, Metrics, Reader, ReadError, clip, exact_sum
from partita.outputs.metrics.ranking import Rankings
from partita_schema.sections.outputs.score import ScoreOutput

if TYPE_CHECKING:
    from partita.lm.heads.base import Head


class ScoreType(HeadOutputType[ScoreOutput]):
    """A number; the rows of a query, the first input, are ranked by it."""

    column: ClassVar = "number"

    def reader(self, labels: Sequence[str]) -> Reader:
        return ScoreReader()

    def metrics(self) -> "ScoreMetrics":
        return ScoreMetrics()

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.score import ScoreHead

        return ScoreHead(loss=self.feature.decoder.loss)

    def truth_of(self, row: Mapping[str, Any]) -> tuple[str, float]:
        """Return the query of a row as a hash, and the true score."""
        return digest(str(row[self.inputs[0].name])), row[self.feature.name]


class ScoreReader(Reader):
    """Reads a number."""

    def read(self, text: str) -> float:
        """Return the number. Raise ReadError."""
        try:
            return float(text)
        except ValueError:
            raise ReadError(f"not a number: {clip(text)}") from None


class ScoreMetrics(Metrics):
    """mrr and ndcg_at_10 over the queries that have a row with a score above 0; mse over the rows with a prediction.

    A row without a prediction is the last one of its query.
    """

    def __init__(self) -> None:
        self.rankings = Rankings()
        self.squares = array("d")

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        query, score = truth
        self.of_row = {"query": query}
        self.rankings.add(query.encode(), score=value if valid else -math.inf, relevance=score)
        if valid:
            error = value - score
            self.squares.append(error * error)  # inf and no OverflowError, if it is too large
        return valid and math.isclose(value, score, rel_tol=1e-9, abs_tol=1e-12)

    def results(self, rows: int) -> dict[str, float]:
        ranks = self.rankings.results()
        mse = exact_sum(self.squares) / len(self.squares) if self.squares else math.inf
        return {"mrr": ranks["mrr"], "ndcg_at_10": ranks["ndcg_at_10"], "mse": mse}

    def details(self) -> dict[str, Any]:
        """Return `queries`, the number of queries that `mrr` and `ndcg_at_10` are means over."""
        return {"queries": self.rankings.results()["queries"]}
