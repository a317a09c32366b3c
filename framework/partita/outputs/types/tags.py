"""The output type tags: a tag for each word, predicted by a head.

The answer is a JSON array of the tags of the words within the model's context. Words beyond it are in no entity.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from partita.outputs.base import ColumnType, Metrics, OutputType, Reader, ReadError, clip
from partita.outputs.metrics.label_counts import LabelCounts
from partita.outputs.types.entities import OUTSIDE, entities
from partita_schema.common.text import counted
from partita_schema.sections.features import TextInput
from partita_schema.sections.outputs.tags import TagsOutput
from partita_schema.words import WordText, read_words

if TYPE_CHECKING:
    from partita.lm.heads.base import Head


class TagsType(OutputType[TagsOutput]):
    """A list of tags, one for each word, and the entities that they mark."""

    column: ClassVar = "json"

    def reader(self, labels: Sequence[str]) -> Reader:
        return TagsReader(labels)

    def metrics(self) -> "TagsMetrics":
        return TagsMetrics()

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.tags import TagHead

        return TagHead(tuple(labels))

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        return 0

    def columns(self) -> dict[str, ColumnType]:
        return super().columns() | {f"{self.feature.name}_spans": "json"}

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        return super().cells(value, raw, scores=scores) | {f"{self.feature.name}_spans": None}

    def cells_of_row(self, value: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """Return the tags of all words and the entities with their characters, and how many words have no tag."""
        if value is None:
            return {}, None
        [read] = self.inputs
        assert isinstance(read, TextInput)
        lowercase = read.preprocessing.lowercase
        text = read_words(row[read.source_column], splitting=self.feature.preprocessing.words, lowercase=lowercase)
        missing = len(text.spans) - len(value)
        tags = [*value, *[OUTSIDE] * missing]
        cells = {self.feature.name: tags, f"{self.feature.name}_spans": list(found_entities(text, tags))}
        reason = f"{counted(missing, 'word')} of {len(text.spans):,} beyond the model's context have no prediction"
        return cells, reason if missing else None


def found_entities(text: WordText, tags: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the entities of a text as spans of characters; a list of words is the text with spaces between them."""
    for entity in entities(tags):
        start, end = text.spans[entity.start][0], text.spans[entity.end - 1][1]
        yield {"start": start, "end": end, "label": entity.type, "text": text[start:end]}


class TagsReader(Reader):
    """Reads a JSON array of tags."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = frozenset(labels)

    def read(self, text: str) -> list[str]:
        """Return the tags. Raise ReadError."""
        try:
            tags = json.loads(text)
        except ValueError:
            raise ReadError(f"not a JSON array of tags: {clip(text)}") from None
        if not isinstance(tags, list):
            raise ReadError(f"not a JSON array of tags: {clip(text)}")
        unknown = next((tag for tag in tags if not isinstance(tag, str) or tag not in self.labels), None)
        if unknown is not None:
            raise ReadError(f"{clip(str(unknown))} is not a tag")
        return tags


class TagsMetrics(Metrics):
    """exact_match: rows with all tags right; word_accuracy; micro_precision, micro_recall and micro_f1 of entities, and
    macro_f1, the mean over their types.

    An entity is right if type, first and last word are (Tjong Kim Sang and De Meulder 2003), as in seqeval. Without any
    entity, the scores of entities are the share of rows without a wrong tag. Words without a prediction are in no
    entity.
    """

    def __init__(self) -> None:
        self.right = self.words = self.right_words = 0
        self.counts = LabelCounts()

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        tags = list(value) if valid else []
        tags += [OUTSIDE] * (len(truth) - len(tags))
        true_entities, found = entities(truth), entities(tags)
        shared = set(true_entities) & set(found)
        self.counts.add(*((entity.type for entity in group) for group in (true_entities, found, shared)))
        hits = sum(mine == theirs for mine, theirs in zip(tags, truth, strict=True)) if valid else 0
        right = valid and hits == len(truth)
        self.words += len(truth)
        self.right_words += hits
        self.right += right
        return right

    def results(self, rows: int) -> dict[str, float]:
        exact = self.right / rows
        micro, macro_f1 = self.counts.micro(), self.counts.macro_f1()
        return {
            "exact_match": exact,
            "micro_precision": exact if micro is None else micro["precision"],
            "micro_recall": exact if micro is None else micro["recall"],
            "micro_f1": exact if micro is None else micro["f1"],
            "macro_f1": exact if macro_f1 is None else macro_f1,
            "word_accuracy": self.right_words / self.words if self.words else exact,
        }

    def details(self) -> dict[str, Any]:
        """Return `per_label`, the metrics of each type of entity."""
        return {"per_label": self.counts.table()}
