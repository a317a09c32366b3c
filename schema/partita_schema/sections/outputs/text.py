"""The output type text: the answer as it is."""

from typing import ClassVar, Literal

from partita_schema.base import ConfigModel, PositiveInt
from partita_schema.cells import text_reader
from partita_schema.sections.features import InputPreprocessing
from partita_schema.sections.outputs.base import OutputBase, ReadCell


class OutputPreprocessing(InputPreprocessing):
    """How a column becomes the training target, and how long an answer may be."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of answer tokens kept in training. Also the maximum number of generated tokens, unless
    generation.max_new_tokens is set. Default: all tokens in training."""


class TextDecoder(ConfigModel):
    """The answer as it is, without surrounding whitespace."""

    type: Literal["text_extractor"] = "text_extractor"
    """Use the whole answer."""
    max_new_tokens: PositiveInt | None = None
    """Maximum number of generated tokens, unless generation.max_new_tokens is set. Default: the max_sequence_length of
    the feature."""


class TextOutput(OutputBase):
    """A free text answer."""

    type: Literal["text"]
    """Free text."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How an answer is decoded."""

    METRICS: ClassVar = {
        "exact_match": "higher",
        "rouge_1": "higher",
        "rouge_2": "higher",
        "rouge_l": "higher",
        "bleu": "higher",
    }
    free_text: ClassVar = True

    def cell_reader(self) -> ReadCell:
        return text_reader(lowercase=self.preprocessing.lowercase)
