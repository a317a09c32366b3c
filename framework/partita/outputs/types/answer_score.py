"""The output type preference with a head: scores of answers, predicted by a reward model."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from partita.outputs.base import ColumnType, HeadOutputType, Reader, ReadError, clip
from partita_schema.sections.outputs.preference import PreferenceOutput

if TYPE_CHECKING:
    from partita.lm.heads.base import Head


class AnswerScoreType(HeadOutputType[PreferenceOutput]):
    """The score of the answer of a row, or of both answers of a pair. Its metrics are those of the objective."""

    def reader(self, labels: Sequence[str]) -> Reader:
        return ScoresReader()

    def metrics(self) -> NoReturn:
        raise AssertionError("the metrics of scores of answers are those of the objective")

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.reward import RewardHead

        return RewardHead()

    def columns(self) -> dict[str, ColumnType]:
        """Return the column of the score, and that of the rejected answer of a pair."""
        name = self.feature.name
        return {f"{name}_score": "number", f"{name}_rejected_score": "number"}

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        """Return the score of the answer, of a pair the chosen one, and the score of the rejected answer or None."""
        return dict(zip(self.columns(), [*(value or ()), None, None], strict=False))


class ScoresReader(Reader):
    """Reads a JSON array of one or two scores."""

    def read(self, text: str) -> list[float]:
        """Return the scores. Raise ReadError."""
        try:
            scores: list[float] = json.loads(text)
        except ValueError:
            raise ReadError(f"not scores: {clip(text)}") from None
        return scores
