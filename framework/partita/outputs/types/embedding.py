"""The output type embedding: a vector of a text, predicted without any text of an answer."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn

from partita.outputs.base import HeadOutputType, Reader, ReadError, clip
from partita_schema.sections.outputs.embedding import EmbeddingOutput

if TYPE_CHECKING:
    from partita.lm.heads.base import Head


class EmbeddingType(HeadOutputType[EmbeddingOutput]):
    """A list of numbers. Its metrics are those of the contrastive objective."""

    column: ClassVar = "vector"

    def reader(self, labels: Sequence[str]) -> Reader:
        return VectorReader()

    def metrics(self) -> NoReturn:
        raise AssertionError("the metrics of embeddings are those of the objective")

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.embedding import EmbeddingHead

        return EmbeddingHead(pooling=self.feature.decoder.pooling)


class VectorReader(Reader):
    """Reads a JSON array of numbers."""

    def read(self, text: str) -> list[float]:
        """Return the numbers. Raise ReadError."""
        try:
            vector: list[float] = json.loads(text)
        except ValueError:
            raise ReadError(f"not a vector: {clip(text)}") from None
        return vector
