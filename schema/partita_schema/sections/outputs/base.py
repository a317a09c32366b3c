"""Base class of output features: what other code asks them, whatever their type."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from partita_schema.base import ConfigModel, Direction, PositiveInt
from partita_schema.cells import plain_text, shown, text_reader
from partita_schema.errors import shortened
from partita_schema.sections.features import FeatureBase
from partita_schema.sections.outputs.grammar_rules import json_rule
from partita_schema.words import Splitting

HeadName = Literal["linear"]
ReadCell = Callable[[Any], Any]
"""Converts a cell of the data to a value. Raises CellError."""


MAX_LABELS = 300
"""Maximum number of characters of all labels in an error text."""


class ValuePreprocessing(ConfigModel):
    """How a column becomes the training target, and how long an answer may be."""

    max_sequence_length: PositiveInt | None = None
    """Maximum number of answer tokens kept in training. Also the maximum number of generated tokens, unless
    generation.max_new_tokens is set. Default: all tokens in training."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Value for missing values, as text; used with fill_with_const."""


class OutputBase(FeatureBase):
    """Base class of output features: the questions of other code, with the answers that most types give.

    A type overrides the answers in which it differs. `partita.outputs` holds what needs the run: decoding and metrics.
    """

    METRICS: ClassVar[Mapping[str, Direction]]
    """Metrics of this type in addition to `invalid`, `errors` and `n`, and whether lower or higher is better."""
    SCORE_METRICS: ClassVar[Mapping[str, Direction]] = {}
    """Further metrics if every label has a score."""
    free_text: ClassVar[bool] = False
    """Whether any text is a value, which may be truncated and is the reply in a dialogue."""
    has_labels: ClassVar[bool] = False
    """Whether values are made of labels; without `labels`, those of the training data are used."""
    one_label: ClassVar[bool] = False
    """Whether a value is exactly one label, which a classifier can choose."""
    truncated: ClassVar[bool] = True
    """Whether training targets are truncated to preprocessing.max_sequence_length."""
    head_reads: ClassVar[Literal["text", "words", "pair", "texts", "answers"]] = "text"
    """What a head reads of a row. text: the prompt; words: the words of the input; pair: both inputs together; texts:
    the prompt, and texts to compare it with; answers: the prompt with answers, as a model that answers has them."""
    has_pairs: ClassVar[bool] = False
    """Whether a row has a chosen and a rejected answer."""
    can_have_head: ClassVar[bool] = False
    """Whether a head can predict the value in place of generated text; the type then has a key `head`."""

    @property
    def has_label(self) -> bool:
        """Whether the data says of each answer whether it is good."""
        return False

    @property
    def is_compared(self) -> bool:
        """Whether predictions are compared with references; otherwise the metrics are those of the objective."""
        return True

    @property
    def has_head(self) -> bool:
        """Whether a head predicts the value, and no text is generated."""
        return getattr(self, "head", None) is not None

    @property
    def labels(self) -> tuple[str, ...] | None:
        """All labels if the file lists them, otherwise None."""
        return None

    @property
    def constrain(self) -> bool | None:
        """Whether answers are constrained by a grammar; None if this type is only constrained along with others."""
        return None

    @property
    def scoring(self) -> bool:
        """Whether labels are scored instead of generating an answer."""
        return False

    @property
    def has_scores(self) -> bool:
        """Whether an answer comes with a score for every label."""
        return self.scoring or (self.has_head and bool(self.SCORE_METRICS))

    @property
    def answer_format(self) -> str:
        """Name of the way in which values are written, if the type has more than one; empty if it has one."""
        return ""

    @property
    def more_columns(self) -> tuple[str, ...]:
        """Columns that training rows hold in addition."""
        return ()

    def more_key(self, column: str) -> str:
        """Return the key of one of the `more_columns` in a cleaned row."""
        return f"{self.name}.{column}"

    def more_reader(self, column: str) -> ReadCell:
        """Return the function that converts cells of one of the `more_columns`."""
        return text_reader()

    @property
    def word_splitting(self) -> Splitting | None:
        """How a text is split into words, if the values are tags of words; otherwise None."""
        return None

    @abstractmethod
    def cell_reader(self) -> ReadCell:
        """Return the function that converts cells of the data."""

    def labels_in(self, value: Any) -> tuple[str, ...]:
        """Return the labels of a value."""
        return ()

    def why_unknown(self, label: str, labels: Sequence[str]) -> str:
        """Return the error text for a label that is none of `labels`."""
        advice = self.label_advice([label], labels)
        reason = f"{shown(label)} is none of the labels {shortened(', '.join(labels), MAX_LABELS)}"
        return f"{reason}; {advice}" if advice else reason

    def label_advice(self, seen: Sequence[str], labels: Sequence[str] = ()) -> str:
        """Return what to change if a label of the data was probably read wrongly; otherwise an empty text.

        `labels` are known to be right.
        """
        return ""

    def answer_labels(self, seen: Sequence[str]) -> tuple[str, ...]:
        """Return all labels as they are written in answers. `seen` are those of the data, if the file lists none."""
        return ()

    def answer_text(self, value: Any) -> str:
        """Return the answer with this value alone."""
        return plain_text(value)

    def answer_member(self, value: Any) -> Any:
        """Return what stands for this value in the JSON object of several outputs."""
        return value

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return the training targets of a value for a head. `labels` are those of the model, in its order."""
        raise AssertionError(f"an output of type {type(self).__name__} has no head")

    def grammar(self, rule: str, *, seen: Sequence[str], alone: bool) -> list[str]:
        """Return grammar rules of a value, the first of which is called `rule`.

        `seen` are the labels of the data. If not `alone`, the value is a member of the JSON object of several outputs.
        """
        return [json_rule(rule, {"type": "string"})]
