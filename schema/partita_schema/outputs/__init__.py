"""Output features. A type of output is a file here, a file in `partita.outputs`, and a place in both tables."""

from typing import Annotated, get_args

from pydantic import Field

from partita_schema.outputs.base import OutputBase
from partita_schema.outputs.category import CategoryOutput
from partita_schema.outputs.json import JsonOutput
from partita_schema.outputs.number import NumberOutput
from partita_schema.outputs.set import SetOutput
from partita_schema.outputs.text import TextOutput

AnyOutput = TextOutput | CategoryOutput | NumberOutput | JsonOutput | SetOutput
"""The table of output types."""
OutputFeature = Annotated[AnyOutput, Field(discriminator="type")]
"""An output feature, selected by its type."""
OUTPUT_MODELS: tuple[type[OutputBase], ...] = get_args(AnyOutput)
