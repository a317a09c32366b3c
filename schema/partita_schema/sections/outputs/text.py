"""The output type text: the answer as it is."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from partita_schema.base import ConfigModel, Direction, Name, PositiveInt
from partita_schema.cells import CellError, plain_text, shown, text_reader
from partita_schema.sections.features import InputPreprocessing
from partita_schema.sections.outputs.base import OutputBase, ReadCell

TEXT_METRICS: Mapping[str, Direction] = {
    "exact_match": "higher",
    "rouge_1": "higher",
    "rouge_2": "higher",
    "rouge_l": "higher",
    "bleu": "higher",
}
"""Metrics of a generated text."""
VERDICTS = {"true": True, "yes": True, "good": True, "1": True, "false": False, "no": False, "bad": False, "0": False}
"""Whether an answer is good, by the text of its label in lower case."""


def read_verdict(value: Any) -> bool:
    """Return whether a label says that an answer is good. Raise CellError if it does not say so."""
    verdict = VERDICTS.get(plain_text(value).strip().lower())
    if verdict is None:
        raise CellError(
            f"{shown(value)} does not say whether the answer is good; write true or false, 1 or 0, yes or no, or good "
            "or bad"
        )
    return verdict


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
    label: Name | None = None
    """Column that says whether the answer is good or bad, for `trainer: {type: kto}`: true or false, 1 or 0, yes or no,
    good or bad. Default: no label."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How the column becomes the training target."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How an answer is decoded."""

    METRICS: ClassVar = TEXT_METRICS
    free_text: ClassVar = True

    @property
    def has_label(self) -> bool:
        """Whether the data says of each answer whether it is good."""
        return self.label is not None

    @property
    def more_columns(self) -> tuple[str, ...]:
        """The column of the label, if there is one."""
        return () if self.label is None else (self.label,)

    def more_reader(self, column: str) -> ReadCell:
        return read_verdict

    def cell_reader(self) -> ReadCell:
        return text_reader(lowercase=self.preprocessing.lowercase)
