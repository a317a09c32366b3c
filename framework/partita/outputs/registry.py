"""The table of output types; the table of their sections is in `partita_schema.sections.outputs`."""

from collections.abc import Sequence
from typing import Any

from partita.outputs.base import OutputType
from partita.outputs.types.answer_score import AnswerScoreType
from partita.outputs.types.category import CategoryType
from partita.outputs.types.embedding import EmbeddingType
from partita.outputs.types.json import JsonType
from partita.outputs.types.number import NumberType
from partita.outputs.types.preference import PreferenceType
from partita.outputs.types.score import ScoreType
from partita.outputs.types.set import SetType
from partita.outputs.types.tags import TagsType
from partita.outputs.types.text import TextType
from partita_schema.config import Config
from partita_schema.sections.features import InputFeature
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.preference import PreferenceOutput

OUTPUT_TYPES: dict[str, type[OutputType[Any]]] = {
    "text": TextType,
    "category": CategoryType,
    "number": NumberType,
    "json": JsonType,
    "set": SetType,
    "tags": TagsType,
    "score": ScoreType,
    "embedding": EmbeddingType,
    "preference": PreferenceType,
}


def output_type(feature: OutputFeature, *, inputs: Sequence[InputFeature] = ()) -> OutputType[Any]:
    """Return the type of an output. `inputs` are the inputs of the rows, which some types show in predictions."""
    if isinstance(feature, PreferenceOutput) and feature.has_head:
        return AnswerScoreType(feature, inputs=inputs)
    return OUTPUT_TYPES[feature.type](feature, inputs=inputs)


def output_types(config: Config) -> dict[str, OutputType[Any]]:
    """Return the types of all outputs by name, in the order of the file."""
    inputs = config.input_features
    return {feature.name: output_type(feature, inputs=inputs) for feature in config.output_features}
