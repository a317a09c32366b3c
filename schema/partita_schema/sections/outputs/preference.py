"""The output type preference: a chosen and a rejected answer. The model answers with text."""

from typing import ClassVar, Literal

from pydantic import model_validator

from partita_schema.base import Name, rule_error
from partita_schema.cells import text_reader
from partita_schema.sections.outputs.base import OutputBase, ReadCell
from partita_schema.sections.outputs.text import TEXT_METRICS, OutputPreprocessing, TextDecoder


class PreferenceOutput(OutputBase):
    """A text of which the data has two: one that was chosen, and one that was rejected."""

    type: Literal["preference"]
    """Two answers to the same prompt, of which one is better; for `trainer: {type: preference}`.
    Generated answers are compared with the chosen one."""
    chosen: Name = "chosen"
    """Column of the better answer: a text, or in a dialogue a message or a list of messages."""
    rejected: Name = "rejected"
    """Column of the worse answer: a text, or in a dialogue a message or a list of messages."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How both columns become training targets."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How a generated answer is decoded."""

    METRICS: ClassVar = TEXT_METRICS
    free_text: ClassVar = True
    has_pairs: ClassVar = True

    @model_validator(mode="after")
    def answers_have_two_columns(self) -> "PreferenceOutput":
        if self.column is not None:
            raise rule_error(
                "a preference has two columns; write chosen and rejected, the names of their columns", at="column"
            )
        if self.chosen == self.rejected:
            raise rule_error(
                f"both answers are in the column {self.chosen!r}; write the column of the worse one", at="rejected"
            )
        return self

    @property
    def source_column(self) -> str:
        """The column of the better answer."""
        return self.chosen

    @property
    def answer_columns(self) -> tuple[str, str]:
        """The columns of the better and the worse answer."""
        return self.chosen, self.rejected

    @property
    def more_columns(self) -> tuple[str, ...]:
        """The column of the worse answer."""
        return (self.rejected,)

    def cell_reader(self) -> ReadCell:
        return text_reader(lowercase=self.preprocessing.lowercase)

    def more_reader(self, column: str) -> ReadCell:
        return self.cell_reader()
