"""Errors for verbs that the embedding-bag classifier does not support."""

from partita_schema.config import Config
from partita_schema.errors import PartitaError
from partita_schema.model import EmbeddingBagModel

GENERATE = "generate: it writes no text; predict answers rows with labels"
SIMULATE = "simulate: it has no dialogues; write a language model as base_model"
TUNE = "tune: its batch sizes are numbers in the file"


def refuse_bag(config: Config, *, what: str) -> None:
    """Raise PartitaError if the model is an embedding bag; `what` has the form `VERB: REASON`."""
    if isinstance(config.base_model, EmbeddingBagModel):
        verb, _, reason = what.partition(": ")
        raise PartitaError(f"there is nothing to {verb} with base_model: {{type: embedding_bag}}: {reason}")
