"""Tests that the registries of both packages have the same output types."""

from typing import get_args

from partita.outputs.registry import OUTPUT_TYPES
from partita_schema.sections.outputs import OUTPUT_MODELS


def test_every_type_of_the_schema_has_a_class_here() -> None:
    names = [get_args(model.model_fields["type"].annotation)[0] for model in OUTPUT_MODELS]
    assert names == list(OUTPUT_TYPES)
