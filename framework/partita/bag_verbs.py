"""What a bag of words does not do, and what does."""

from partita_schema.config import Config
from partita_schema.errors import PartitaError
from partita_schema.model import EmbeddingBagModel

GENERATE = "generate: it writes no text; predict answers rows with labels"
SIMULATE = "simulate: it has no dialogues; write a language model as base_model"
TUNE = "tune: its batch sizes are numbers in the file"


def refuse_bag(config: Config, *, what: str) -> None:
    """Raises PartitaError where the model is a bag of words; `what` begins with the verb."""
    if isinstance(config.base_model, EmbeddingBagModel):
        verb, _, reason = what.partition(": ")
        raise PartitaError(f"there is nothing to {verb} with base_model: {{type: embedding_bag}}: {reason}")
