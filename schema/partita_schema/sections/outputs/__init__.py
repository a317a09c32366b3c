"""Output features. A type of output is a file here, a file in `partita.outputs`, and a place in both tables."""

from typing import Annotated, get_args

from pydantic import Field

from partita_schema.sections.outputs.base import Direction, OutputBase
from partita_schema.sections.outputs.category import CategoryOutput
from partita_schema.sections.outputs.json import JsonOutput
from partita_schema.sections.outputs.number import NumberOutput
from partita_schema.sections.outputs.set import SetOutput
from partita_schema.sections.outputs.text import TextOutput

AnyOutput = TextOutput | CategoryOutput | NumberOutput | JsonOutput | SetOutput
"""The table of output types."""
OutputFeature = Annotated[AnyOutput, Field(discriminator="type")]
"""An output feature, selected by its type."""
OUTPUT_MODELS: tuple[type[OutputBase], ...] = get_args(AnyOutput)

SHARED_METRICS = ("invalid", "errors", "n")
"""Metrics of every output."""
DIRECTIONS: dict[str, Direction] = {"loss": "lower", "invalid": "lower", "errors": "lower"}
for model in OUTPUT_MODELS:
    DIRECTIONS |= model.METRICS
"""Metrics that can rank checkpoints, by the last part of their name."""


def direction_of(metric: str) -> Direction | None:
    """Return whether lower or higher values of a metric are better, or None if it does not measure quality, such as
    `n`.

    `NAME.field.FIELD` is the accuracy of a JSON field, whatever the field's name.
    """
    if ".field." in metric:
        return "higher"
    return DIRECTIONS.get(metric.rsplit(".", 1)[-1])


def ranking_metrics(output: OutputBase) -> tuple[str, ...]:
    """Return the metrics of an output that can rank checkpoints."""
    return tuple(metric for metric in (*output.METRICS, *SHARED_METRICS) if direction_of(metric) is not None)
