"""The table of output types; the table of their sections is in `partita_schema.sections.outputs`."""

from typing import Any

from partita.outputs.base import OutputType
from partita.outputs.category import CategoryType
from partita.outputs.json import JsonType
from partita.outputs.number import NumberType
from partita.outputs.set import SetType
from partita.outputs.text import TextType
from partita_schema.config import Config
from partita_schema.sections.outputs import OutputFeature

OUTPUT_TYPES: dict[str, type[OutputType[Any]]] = {
    "text": TextType,
    "category": CategoryType,
    "number": NumberType,
    "json": JsonType,
    "set": SetType,
}


def output_type(feature: OutputFeature) -> OutputType[Any]:
    """Return the type of an output."""
    return OUTPUT_TYPES[feature.type](feature)


def output_types(config: Config) -> dict[str, OutputType[Any]]:
    """Return the types of all outputs by name, in the order of the file."""
    return {feature.name: output_type(feature) for feature in config.output_features}
