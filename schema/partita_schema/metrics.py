"""The direction of each metric, which trainers need to select the best checkpoint."""

from partita_schema.outputs import OUTPUT_MODELS
from partita_schema.outputs.base import Direction

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
