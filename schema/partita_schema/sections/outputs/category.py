"""The output type category: one label of a fixed set."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from partita_schema.base import ConfigModel, Name, PositiveInt, StrictBool, check_regex, rule_error
from partita_schema.cells import CellError, text_reader
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell
from partita_schema.sections.outputs.grammar_rules import json_rule
from partita_schema.sections.outputs.label_rules import refuse_outer_spaces


class CategoryPreprocessing(ConfigModel):
    """How a column becomes a label."""

    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a label. drop_row: drop and count the row; fill_with_const: use fill_value."""
    fill_value: str = ""
    """Label for missing values; used with fill_with_const."""
    lowercase: StrictBool = False
    """Convert labels to lower case."""
    fallback_label: Name | None = None
    """Alias of decoder.fallback_label."""
    vocab: tuple[Name, ...] | None = None
    """Alias of decoder.labels."""
    max_sequence_length: PositiveInt | None = None
    """Maximum number of generated tokens. Default: enough for the longest label."""

    @model_validator(mode="after")
    def labels_have_no_spaces_around(self) -> "CategoryPreprocessing":
        refuse_outer_spaces(self.vocab or (), at="vocab")
        refuse_outer_spaces([self.fallback_label or ""], at="fallback_label")
        return self


class Match(ConfigModel):
    """A rule that recognizes a label in an answer."""

    type: Literal["contains", "regex", "exact"] = "contains"
    """How `value` is compared with the answer, ignoring case. contains: the answer contains it; regex: it matches
    somewhere in the answer; exact: the answer equals it, without surrounding whitespace."""
    value: Name
    """Text or regular expression to look for."""

    @model_validator(mode="after")
    def regex_compiles(self) -> "Match":
        if self.type == "regex":
            check_regex(self.value, at="value")
        return self


class CategoryDecoder(ConfigModel):
    """Extraction of a label from an answer."""

    type: Literal["category_extractor"] = "category_extractor"
    """Extract one label of a fixed set."""
    labels: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """All labels. Default: the keys of `match`; without `match`, the labels seen in the training data."""
    match: dict[str, Match] | None = None
    """Rules by label, tried in the order written. Default: the label that equals the answer, otherwise the only label
    that the answer contains."""
    fallback_label: Name | None = None
    """Label for answers that match no rule. Default: no label; the row counts as wrong."""
    scoring: StrictBool = False
    """Score each label instead of generating, and choose the label with the highest probability as a complete answer.
    Adds the columns `<output>_probability` and `<output>_probabilities` to predictions."""

    @model_validator(mode="after")
    def rules_name_labels(self) -> "CategoryDecoder":
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            twice = next(label for label in self.labels if self.labels.count(label) > 1)
            raise rule_error(f"labels holds {twice!r} twice; write each label once", at="labels")
        unknown = [label for label in self.match or {} if self.labels is not None and label not in self.labels]
        if unknown:
            raise rule_error(
                f"match names {unknown[0]!r}, which is not in labels; add it there or remove the rule",
                at=f"match.{unknown[0]}",
            )
        refuse_outer_spaces(self.labels or (), at="labels")
        refuse_outer_spaces(self.match or (), at="match")
        refuse_outer_spaces([self.fallback_label or ""], at="fallback_label")
        return self


class CategoryOutput(OutputBase):
    """A label of a fixed set. Booleans of the data are the labels true and false."""

    type: Literal["category"]
    """Category: one label of a fixed set."""
    head: HeadName | None = None
    """Predict with a layer on top of the model in place of generated text. linear: a linear layer, as in
    AutoModelForSequenceClassification of transformers. Default: linear for encoders such as BERT, otherwise no head."""
    preprocessing: CategoryPreprocessing = CategoryPreprocessing.model_construct()
    """How the column becomes a label."""
    decoder: CategoryDecoder = CategoryDecoder.model_construct()
    """How a label is extracted from an answer."""

    METRICS: ClassVar = {"accuracy": "higher", "macro_f1": "higher", "weighted_f1": "higher"}
    SCORE_METRICS: ClassVar = {"auroc": "higher", "average_precision": "higher"}
    has_labels: ClassVar = True
    one_label: ClassVar = True
    can_have_head: ClassVar = True
    truncated: ClassVar = False

    @model_validator(mode="after")
    def set_in_one_key(self) -> "CategoryOutput":
        for ours, theirs in (("labels", "vocab"), ("fallback_label", "fallback_label")):
            if getattr(self.decoder, ours) is not None and getattr(self.preprocessing, theirs) is not None:
                raise rule_error(
                    f"decoder.{ours} and preprocessing.{theirs} cannot both be set; write decoder.{ours}",
                    at=f"preprocessing.{theirs}",
                )
        if self.labels is not None and self.fallback_label is not None and self.fallback_label not in self.labels:
            part = "decoder" if self.decoder.fallback_label is not None else "preprocessing"
            raise rule_error(
                f"{self.fallback_label!r} is not one of the labels; write one of {', '.join(self.labels)}",
                at=f"{part}.fallback_label",
            )
        return self

    @property
    def labels(self) -> tuple[str, ...] | None:
        """All labels if the file lists them, otherwise None."""
        if self.decoder.labels is not None:
            return self.decoder.labels
        if self.preprocessing.vocab is not None:
            return self.preprocessing.vocab
        return tuple(self.decoder.match) if self.decoder.match else None

    @property
    def fallback_label(self) -> str | None:
        """Label for answers that match no rule, or None."""
        return self.decoder.fallback_label or self.preprocessing.fallback_label

    @property
    def scoring(self) -> bool:
        return self.decoder.scoring

    def cell_reader(self) -> ReadCell:
        read, labels = text_reader(lowercase=self.preprocessing.lowercase), self.labels
        known = None if labels is None else frozenset(map(self._written, labels))

        def read_label(value: Any) -> str:
            label = read(value).strip()
            if known is not None and label not in known:
                raise CellError(self.why_unknown(label, labels or ()))
            return label

        return read_label

    def labels_in(self, value: Any) -> tuple[str, ...]:
        return (value,)

    def answer_labels(self, seen: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self._written, self.labels or seen)))

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return the index of the label."""
        return (float(labels.index(value)),)

    def grammar(self, rule: str, *, seen: Sequence[str], alone: bool) -> list[str]:
        if not seen or self.decoder.match:  # with match rules, any text may contain a label
            return super().grammar(rule, seen=seen, alone=alone)
        return [json_rule(rule, {"enum": list(dict.fromkeys(map(self._written, seen)))})]

    def _written(self, label: str) -> str:
        return label.lower() if self.preprocessing.lowercase else label
