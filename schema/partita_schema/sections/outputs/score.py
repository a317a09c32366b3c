"""The output type score: how well two texts fit each other, such as a query and a document."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from partita_schema.base import ConfigModel
from partita_schema.cells import NUMBER, CellError, plain_text, shown
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell


class ScorePreprocessing(ConfigModel):
    """How a column becomes a score."""

    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = "0"
    """Score for missing values; used with fill_with_const."""


class ScoreDecoder(ConfigModel):
    """How a score is learned."""

    type: Literal["score_extractor"] = "score_extractor"
    """Predict a score."""
    loss: Literal["binary_cross_entropy", "squared_error"] = "binary_cross_entropy"
    """What is minimized. binary_cross_entropy: scores are probabilities, and those of the data are 0 and 1 or between;
    squared_error: scores are any numbers."""


class ScoreOutput(OutputBase):
    """A score of two texts: relevance of a document to a query, similarity of two sentences."""

    type: Literal["score"]
    """Score: how well the two inputs fit each other, such as a query and a document (a reranker)."""
    head: HeadName = "linear"
    """The layer on top of the model that predicts the score. linear: a linear layer with one output, as in
    AutoModelForSequenceClassification of transformers."""
    preprocessing: ScorePreprocessing = ScorePreprocessing.model_construct()
    """How a column becomes a score."""
    decoder: ScoreDecoder = ScoreDecoder.model_construct()
    """How a score is learned."""

    METRICS: ClassVar = {"mrr": "higher", "ndcg_at_10": "higher", "mse": "lower"}
    can_have_head: ClassVar = True
    truncated: ClassVar = False
    head_reads: ClassVar = "pair"

    def cell_reader(self) -> ReadCell:
        probability = self.decoder.loss == "binary_cross_entropy"

        def read(value: Any) -> float:
            text = str(int(value)) if isinstance(value, bool) else plain_text(value).strip()
            if not re.fullmatch(NUMBER, text):
                raise CellError(f"{shown(value)} is not a number")
            score = float(text)
            if probability and not 0 <= score <= 1:
                raise CellError(
                    f"the score {text} is not between 0 and 1; write decoder: {{loss: squared_error}}, or divide it"
                )
            return score

        return read

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return the score itself."""
        return (value,)
