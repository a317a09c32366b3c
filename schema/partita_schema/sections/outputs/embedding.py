"""The output type embedding: a vector of a text, for search and clustering."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from partita_schema.base import ConfigModel, Name
from partita_schema.cells import text_reader
from partita_schema.sections.outputs.base import OutputBase, ReadCell


class EmbeddingPreprocessing(ConfigModel):
    """The texts that a text is compared with in training."""

    negatives: tuple[Name, ...] = ()
    """Columns of texts that do not fit the input (hard negatives). The positives and negatives of all other rows of a
    step are negatives, too."""
    prefix: str = ""
    """Text before positives and negatives, such as "passage: " for E5. Before the input, write prompt.template."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a positive text. drop_row: drop and count the row; fill_with_const: use
    fill_value."""
    fill_value: str = ""
    """Text for missing values; used with fill_with_const."""


class EmbeddingDecoder(ConfigModel):
    """How the vector of a text is computed and learned."""

    type: Literal["embedding_extractor"] = "embedding_extractor"
    """Compute a vector of length 1."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """How the hidden states of the tokens become a vector. mean: their mean; cls: the first; last: the last; auto: mean
    for encoders, last for decoders."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Divides the cosine similarities in the loss. Lower values punish the most similar negatives more."""


class EmbeddingOutput(OutputBase):
    """A vector of the input, learned from pairs of texts."""

    type: Literal["embedding"]
    """Embedding: a vector of the input, such that texts that fit each other have similar vectors. The column holds a
    text that fits the input (the positive)."""
    preprocessing: EmbeddingPreprocessing = EmbeddingPreprocessing.model_construct()
    """The texts that a text is compared with in training."""
    decoder: EmbeddingDecoder = EmbeddingDecoder.model_construct()
    """How the vector of a text is computed and learned."""

    METRICS: ClassVar = {"mrr": "higher", "recall_at_1": "higher", "recall_at_5": "higher", "recall_at_10": "higher"}
    can_have_head: ClassVar = True
    truncated: ClassVar = False
    head_reads: ClassVar = "texts"

    @property
    def is_compared(self) -> bool:
        return False

    @property
    def has_head(self) -> bool:
        return True

    @property
    def more_columns(self) -> tuple[str, ...]:
        return self.preprocessing.negatives

    def cell_reader(self) -> ReadCell:
        return text_reader()
