"""Input features, and what they share with output features (`partita_schema.sections.outputs`)."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from partita_schema.base import ConfigModel, Name, PositiveInt, StrictBool


class InputPreprocessing(ConfigModel):
    """How a column becomes part of the prompt."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of tokens kept from this column. Default: all."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Text for missing values; used with fill_with_const."""
    lowercase: StrictBool = False
    """Convert the text to lower case."""


class FeatureBase(ConfigModel):
    """Options of all features."""

    name: Name
    """Name of the feature in the prompt template and in predictions."""
    column: Name | None = None
    """Column of the data. Default: `name`."""

    @property
    def source_column(self) -> str:
        """The data column of this feature."""
        return self.column or self.name

    @property
    def length_limit(self) -> int | None:
        """Maximum number of tokens kept from this feature; None without a limit."""
        limit: int | None = getattr(getattr(self, "preprocessing", None), "max_sequence_length", None)
        return limit


class TextInput(FeatureBase):
    """A text column that goes into the prompt."""

    type: Literal["text"] = "text"
    """Text input."""
    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """How the column becomes part of the prompt."""


class DialogueInput(FeatureBase):
    """A dialogue that the model continues. It is the whole prompt."""

    type: Literal["dialogue"]
    """Dialogue input, in any format of `data.dialogue.format`."""


def text_unless_said(value: object) -> object:
    return {**value, "type": "text"} if isinstance(value, dict) and "type" not in value else value


InputFeature = Annotated[
    Annotated[TextInput | DialogueInput, Field(discriminator="type")], BeforeValidator(text_unless_said)
]
"""An input feature, selected by its type; text by default."""


class InputDefaults(ConfigModel):
    """Default options of all text inputs."""

    preprocessing: InputPreprocessing = InputPreprocessing.model_construct()
    """Default preprocessing of text inputs; options set in a feature override it."""


class Defaults(ConfigModel):
    """Default options by feature type."""

    text: InputDefaults = InputDefaults.model_construct()
    """Default options of text inputs."""
