"""The output type set: any number of labels of a fixed set."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from partita_schema.base import ConfigModel, Fraction, Name, PositiveInt, StrictBool, rule_error
from partita_schema.cells import CellError, compact_json, parse_cell, plain_text, shown
from partita_schema.common.text import first_repeated
from partita_schema.sections.outputs.base import HeadName, OutputBase, ReadCell
from partita_schema.sections.outputs.grammar_rules import json_rule, quoted
from partita_schema.sections.outputs.label_rules import refuse_outer_spaces

COMMA = ", "
"""Separates labels in answers with `format: comma`."""


USUAL_SEPARATORS = (";", "|", ",")
"""Separators that are suggested."""


class SetPreprocessing(ConfigModel):
    """How a column becomes a set of labels, and how answers are written."""

    format: Literal["json", "comma"] = "json"
    """How labels are written in training targets and answers. json: a JSON array; comma: text with commas between the
    labels. In the JSON object of several outputs, an array or a string."""
    separator: Name = ","
    """Separator of labels in a text column. Lists, and text that begins with [, are read as JSON arrays."""
    missing_value_strategy: Literal["drop_row", "fill_with_const"] = "drop_row"
    """What to do with a row without a value. drop_row: drop and count the row; fill_with_const: use fill_value. An
    empty list is a value."""
    fill_value: str = ""
    """Labels for missing values, as in a text column; empty for no labels. Used with fill_with_const."""
    max_sequence_length: PositiveInt | None = None
    """Maximum number of generated tokens. Default: enough for all labels."""


class SetDecoder(ConfigModel):
    """Extraction of labels from an answer."""

    type: Literal["set_extractor"] = "set_extractor"
    """Extract labels of a fixed set."""
    labels: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """All labels, in the order in which answers name them. Default: the labels seen in the training data, sorted."""
    threshold: Fraction = 0.5
    """With a head, minimum probability of the labels in the set."""
    constrain: StrictBool = False
    """Constrained decoding: only labels can be generated, each at most once, in their order. An answer that reaches the
    token limit is still cut off."""

    @model_validator(mode="after")
    def labels_differ(self) -> "SetDecoder":
        labels = self.labels or ()
        twice = first_repeated(labels)
        if twice is not None:
            raise rule_error(f"labels holds {twice!r} twice; write each label once", at="labels")
        refuse_outer_spaces(labels, at="labels", blank="remove it, an empty set needs no label")
        return self


class SetOutput(OutputBase):
    """Several labels of a fixed set, or none."""

    type: Literal["set"]
    """Set: any number of labels of a fixed set."""
    head: HeadName | None = None
    """Predict with a layer on top of the model in place of generated text. linear: a linear layer, as in
    AutoModelForSequenceClassification of transformers. Default: linear for encoders such as BERT, otherwise no head."""
    preprocessing: SetPreprocessing = SetPreprocessing.model_construct()
    """How the column becomes a set of labels, and how answers are written."""
    decoder: SetDecoder = SetDecoder.model_construct()
    """How labels are extracted from an answer."""

    METRICS: ClassVar = {"exact_match": "higher", "micro_f1": "higher", "macro_f1": "higher", "jaccard": "higher"}
    SCORE_METRICS: ClassVar = {"auroc": "higher", "average_precision": "higher"}
    has_labels: ClassVar = True
    can_have_head: ClassVar = True
    truncated: ClassVar = False

    @model_validator(mode="after")
    def labels_have_no_comma(self) -> "SetOutput":
        mixed = next((label for label in self.labels or () if self.with_comma(label)), None)
        if mixed is not None:
            raise rule_error(f"{comma_mistake(mixed)} or rename the label", at="decoder.labels")
        return self

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.decoder.labels

    @property
    def constrain(self) -> bool:
        return self.decoder.constrain

    @property
    def answer_format(self) -> str:
        return self.preprocessing.format

    def with_comma(self, label: str) -> bool:
        """Return whether a label contains the comma that separates labels in answers."""
        return self.preprocessing.format == "comma" and "," in label

    def cell_reader(self) -> ReadCell:
        labels, separator = self.labels, self.preprocessing.separator
        known = None if labels is None else frozenset(labels)

        def read_labels(value: Any) -> list[str]:
            labels_found: dict[str, None] = {}
            for label in cell_labels(value, separator=separator):
                if known is not None and label not in known:
                    raise CellError(self.why_unknown(label, labels or ()))
                if self.with_comma(label):
                    raise CellError(comma_mistake(label))
                labels_found[label] = None
            return in_order(labels_found, labels)

        return read_labels

    def labels_in(self, value: Any) -> tuple[str, ...]:
        return tuple(value)

    def label_advice(self, seen: Sequence[str], labels: Sequence[str] = ()) -> str:
        """Suggest another separator if a label contains it and shares a part with another label."""
        for mark in USUAL_SEPARATORS:
            parts_of = [{part.strip() for part in label.split(mark)} for label in (*seen, *labels)]
            counts = Counter(part for parts in parts_of for part in parts)
            for label, parts in zip(seen, parts_of, strict=False):
                if mark != self.preprocessing.separator and mark in label and any(counts[part] > 1 for part in parts):
                    return f"if {shown(label)} is several labels, write preprocessing: {{separator: '{mark}'}}"
        return ""

    def answer_labels(self, seen: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.labels or seen))

    def answer_text(self, value: Any) -> str:
        return COMMA.join(value) if self.preprocessing.format == "comma" else compact_json(value)

    def answer_member(self, value: Any) -> Any:
        return self.answer_text(value) if self.preprocessing.format == "comma" else value

    def head_targets(self, value: Any, labels: Sequence[str]) -> Sequence[float]:
        """Return 1 for each label of the set and 0 for the others."""
        members = frozenset(value)
        return [float(label in members) for label in labels]

    def grammar(self, rule: str, *, seen: Sequence[str], alone: bool) -> list[str]:
        labels, comma = self.answer_labels(seen), self.preprocessing.format == "comma"
        if not labels:
            return [json_rule(rule, {"type": "string"} if comma else {"type": "array", "items": {"type": "string"}})]
        if not comma:
            return subset_rules(rule, [quoted(label) for label in labels], around=("[", "]"))
        if alone:
            return subset_rules(rule, labels, around=("", ""))
        return subset_rules(rule, [quoted(label)[1:-1] for label in labels], around=('"', '"'))


def cell_labels(value: Any, *, separator: str) -> Iterable[str]:
    """Yield the labels of a cell. Raise CellError if it holds something else."""
    if isinstance(value, str):
        items = parse_cell(value) if value.lstrip().startswith("[") else value.split(separator)
    else:
        items = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
    for item in items if isinstance(items, list | tuple | set | frozenset) else [items]:
        label = plain_text(item).strip()
        if label:
            yield label


def in_order(labels_seen: Iterable[str], labels: Sequence[str] | None) -> list[str]:
    """Return labels in the order of all labels; sorted if these are unknown."""
    return sorted(labels_seen) if labels is None else [label for label in labels if label in labels_seen]


def comma_mistake(label: str) -> str:
    """Return why a label cannot be written with commas between labels."""
    return f"the label {shown(label)} contains a comma, which separates labels; write preprocessing: {{format: json}}"


def subset_rules(rule: str, texts: Sequence[str], *, around: tuple[str, str]) -> list[str]:
    """Return grammar rules of any of the texts, in their order, each at most once, with commas between.

    `RULE_from_N` begins with one of the texts from N on, and `RULE_after_N` continues after a text before N. Rules for
    all combinations in one would be exponentially many.
    """
    opening, closing = (f"{quoted(mark)} " if mark else "" for mark in around)
    rules = [f"{rule}: {opening}{rule}_from_0? {closing}".rstrip()]
    last = len(texts) - 1
    for index, text in enumerate(texts):
        more = f" {rule}_after_{index + 1}" if index < last else ""
        later = f" | {rule}_from_{index + 1}" if index < last else ""
        rules.append(f"{rule}_from_{index}: {quoted(text)}{more}{later}")
        if index:
            rules.append(f"{rule}_after_{index}: (COMMA {quoted(text)})?{more}")
    return rules
