"""The output type tags: a tag for each word of a text."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from partita_schema.base import ConfigModel, Name, rule_error
from partita_schema.common.text import first_repeated
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell
from partita_schema.sections.outputs.label_rules import refuse_outer_spaces
from partita_schema.words import Splitting, read_tags


class TagsPreprocessing(ConfigModel):
    """How a text becomes words, and a column their tags."""

    words: Splitting = "punctuation"
    """How the text of the input is split into words; a list is words already. punctuation: at white space, and every
    punctuation mark is a word; whitespace: at white space only."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value. An
    empty list is a value: no entities."""
    fill_value: str = ""
    """Tags for missing values, with spaces between; empty for no entities. Used with fill_with_const."""


class TagsDecoder(ConfigModel):
    """The tags that a word can have."""

    type: Literal["tags_extractor"] = "tags_extractor"
    """Predict a tag for each word."""
    labels: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """All tags, such as [O, B-PER, I-PER]. Default: the tags seen in the training data, sorted."""

    @model_validator(mode="after")
    def labels_differ(self) -> "TagsDecoder":
        twice = first_repeated(self.labels or ())
        if twice is not None:
            raise rule_error(f"labels holds {twice!r} twice; write each tag once", at="labels")
        refuse_outer_spaces(self.labels or (), at="labels")
        return self


class TagsOutput(OutputBase):
    """A tag for each word: named entities, parts of speech."""

    type: Literal["tags"]
    """Tags: one of a fixed set for each word of the input, which is the only one."""
    head: HeadName = "linear"
    """The layer on top of the model that predicts the tags. linear: a linear layer, as in
    AutoModelForTokenClassification of transformers."""
    preprocessing: TagsPreprocessing = TagsPreprocessing.model_construct()
    """How a text becomes words, and a column their tags."""
    decoder: TagsDecoder = TagsDecoder.model_construct()
    """The tags that a word can have."""

    METRICS: ClassVar = {
        "exact_match": "higher",
        "micro_precision": "higher",
        "micro_recall": "higher",
        "micro_f1": "higher",
        "macro_f1": "higher",
        "word_accuracy": "higher",
    }
    has_labels: ClassVar = True
    can_have_head: ClassVar = True
    truncated: ClassVar = False
    head_reads: ClassVar = "words"

    @property
    def word_splitting(self) -> Splitting | None:
        return self.preprocessing.words

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.decoder.labels

    def cell_reader(self) -> ReadCell:
        labels = self.labels

        def read(value: Any) -> Any:
            return read_tags(value, labels=labels)

        return read

    def answer_text(self, value: Any) -> str:
        """Return the tags with spaces between them."""
        return " ".join(value)

    def labels_in(self, value: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return the index of each tag."""
        return [float(labels.index(tag)) for tag in value]

    def answer_labels(self, seen: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.labels or seen))
