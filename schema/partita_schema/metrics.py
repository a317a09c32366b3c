"""The direction of each metric, which trainers need to select the best checkpoint."""

from typing import Literal

DIRECTIONS: dict[str, Literal["lower", "higher"]] = {
    "loss": "lower",
    "invalid": "lower",
    "errors": "lower",
    "exact_match": "higher",
    "accuracy": "higher",
    "macro_f1": "higher",
    "weighted_f1": "higher",
    "mae": "lower",
    "mse": "lower",
    "rmse": "lower",
    "r2": "higher",
    "valid": "higher",
    "field_accuracy": "higher",
    "rouge_1": "higher",
    "rouge_2": "higher",
    "rouge_l": "higher",
    "bleu": "higher",
}
"""Metrics that can rank checkpoints, by the last part of their name."""


def direction_of(metric: str) -> Literal["lower", "higher"] | None:
    """Return whether lower or higher values of a metric are better, or None if it does not measure quality, such as
    `n`.

    `NAME.field.FIELD` is the accuracy of a JSON field, whatever the field's name.
    """
    if ".field." in metric:
        return "higher"
    return DIRECTIONS.get(metric.rsplit(".", 1)[-1])
