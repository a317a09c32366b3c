"""The output type preference: a chosen and a rejected answer. The model answers with text, or a head scores answers."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from partita_schema.base import Name, rule_error
from partita_schema.cells import NUMBER, CellError, plain_text, shown, text_reader
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell
from partita_schema.sections.outputs.text import TEXT_METRICS, OutputPreprocessing, TextDecoder


class PreferenceOutput(OutputBase):
    """A text of which the data has two: one that was chosen, and one that was rejected."""

    type: Literal["preference"]
    """Two answers to the same prompt, of which one is better; for `trainer: {type: preference}` and `{type: reward}`.
    Generated answers are compared with the chosen one."""
    chosen: Name = "chosen"
    """Column of the better answer: a text, or in a dialogue a message or a list of messages."""
    rejected: Name = "rejected"
    """Column of the worse answer: a text, or in a dialogue a message or a list of messages."""
    margin: Name | tuple[Name, Name] | None = None
    """Column with the margin by which the score of the better answer should be higher, or the columns with scores of
    the better and the worse answer, whose difference it is; for `trainer: {type: reward}`. Default: no margin."""
    head: HeadName | None = None
    """Score answers with a layer on top of the model in place of generating one: a reward model. linear: a linear layer
    with one output, as in AutoModelForSequenceClassification of transformers. Default: linear with `trainer: {type:
    reward}`, otherwise no head."""
    preprocessing: OutputPreprocessing = OutputPreprocessing.model_construct()
    """How both columns become training targets."""
    decoder: TextDecoder = TextDecoder.model_construct()
    """How a generated answer is decoded."""

    METRICS: ClassVar = TEXT_METRICS
    free_text: ClassVar = True
    has_pairs: ClassVar = True
    head_reads: ClassVar = "answers"

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
        if answer := next((name for name in self.margin_columns if name in self.answer_columns), None):
            raise rule_error(f"the column {answer!r} holds an answer; write a column of numbers", at="margin")
        return self

    @property
    def is_compared(self) -> bool:
        """Whether an answer is generated and compared with the chosen one; scores have no reference."""
        return not self.has_head

    @property
    def source_column(self) -> str:
        """The column of the better answer."""
        return self.chosen

    @property
    def scored_column(self) -> str:
        """The column of an answer to score without another one to compare it with."""
        return self.name

    @property
    def answer_columns(self) -> tuple[str, str]:
        """The columns of the better and the worse answer."""
        return self.chosen, self.rejected

    @property
    def margin_columns(self) -> tuple[str, ...]:
        """The columns of the margin, or of both scores."""
        return (self.margin,) if isinstance(self.margin, str) else self.margin or ()

    @property
    def more_columns(self) -> tuple[str, ...]:
        """The column of the worse answer, and those of the margin."""
        return (self.rejected, *self.margin_columns)

    def cell_reader(self) -> ReadCell:
        return text_reader(lowercase=self.preprocessing.lowercase)

    def more_reader(self, column: str) -> ReadCell:
        return read_number if column in self.margin_columns else self.cell_reader()


def read_number(value: Any) -> float:
    """Return the number in a cell. Raise CellError if there is none."""
    text = str(int(value)) if isinstance(value, bool) else plain_text(value).strip()
    if not NUMBER.fullmatch(text):
        raise CellError(f"{shown(value)} is not a number")
    return float(text)
