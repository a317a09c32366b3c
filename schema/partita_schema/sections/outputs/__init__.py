"""Output features. A type of output is a file here, a file in `partita.outputs`, and a place in both tables."""

from typing import Annotated, get_args

from pydantic import Field

from partita_schema.base import Direction
from partita_schema.sections.objectives import DOCUMENT_METRICS, OBJECTIVE_METRICS
from partita_schema.sections.outputs.base import OutputBase
from partita_schema.sections.outputs.category import CategoryOutput
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_schema.sections.outputs.json import JsonOutput
from partita_schema.sections.outputs.number import NumberOutput
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.sections.outputs.score import ScoreOutput
from partita_schema.sections.outputs.set import SetOutput
from partita_schema.sections.outputs.tags import TagsOutput
from partita_schema.sections.outputs.text import TextOutput

AnyOutput = (
    TextOutput
    | CategoryOutput
    | NumberOutput
    | JsonOutput
    | SetOutput
    | TagsOutput
    | ScoreOutput
    | EmbeddingOutput
    | PreferenceOutput
)
"""The table of output types."""
OutputFeature = Annotated[AnyOutput, Field(discriminator="type")]
"""An output feature, selected by its type."""
OUTPUT_MODELS: tuple[type[OutputBase], ...] = get_args(AnyOutput)

METRICS_BY_NAME = (".field.", ".slot.")
"""Parts of the names of metrics that end with the name of a JSON field or slot."""
SHARED_METRICS = ("invalid", "errors", "n")
"""Metrics of every output."""
DIRECTIONS: dict[str, Direction] = {"loss": "lower", "invalid": "lower", "errors": "lower"}
DIRECTIONS |= {**OBJECTIVE_METRICS, **DOCUMENT_METRICS}
for model in OUTPUT_MODELS:
    DIRECTIONS |= {**model.METRICS, **model.SCORE_METRICS}
"""Metrics that can rank checkpoints, by the last part of their name."""


def direction_of(metric: str) -> Direction | None:
    """Return whether lower or higher values of a metric are better, or None if it does not measure quality, such as
    `n`.

    `NAME.field.FIELD` and `NAME.slot.PATH` are scores of a part of a JSON object, for any FIELD and PATH.
    """
    if any(part in metric for part in METRICS_BY_NAME):
        return "higher"
    return DIRECTIONS.get(metric.rsplit(".", 1)[-1])


def checkpoint_metrics(output: OutputBase) -> tuple[str, ...]:
    """Return the metrics of an output that can rank checkpoints."""
    if output.has_pairs and not output.is_compared:
        return ()  # nothing is generated; the metrics are those of the objective
    names = (*output.METRICS, *(output.SCORE_METRICS if output.has_scores else ()), *SHARED_METRICS)
    return tuple(metric for metric in names if direction_of(metric) is not None)
