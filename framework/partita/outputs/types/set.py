"""The output type set: find the labels in an answer.

The answer is a JSON array, alone or surrounded by text, or labels with commas between. Case and the way an accented
letter is encoded are ignored, unless two labels differ only in that. A label that is not in the list makes the answer
unreadable, because the rest would be a guess; one that is named twice counts once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from partita.outputs.base import ColumnType, Metrics, OutputType, Reader, ReadError, clip, exact_sum
from partita.outputs.find_json import find_json
from partita.outputs.metrics.label_counts import LabelCounts
from partita.outputs.metrics.label_scores import LabelScores, label_table
from partita.outputs.types.label_forms import composed, labels_by_form
from partita_schema.cells import compact_json
from partita_schema.sections.outputs.set import SetOutput

if TYPE_CHECKING:
    from partita.lm.heads.base import Head

MARKS = ".\"'`"
"""Characters that may surround a label between commas."""
SPARE_TOKENS = 16
"""Extra tokens in addition to all labels, for an answer such as "The topics are: ..."."""


class SetType(OutputType[SetOutput]):
    """A list of labels, in the order of all labels; with a head also the probability of each label."""

    column: ClassVar = "json"

    def reader(self, labels: Sequence[str]) -> Reader:
        return CommaReader(labels) if self.feature.answer_format == "comma" else ArrayReader(labels)

    def metrics(self) -> "SetMetrics":
        return SetMetrics(scored=self.feature.has_scores)

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.base import MultiLabelHead

        return MultiLabelHead(tuple(labels), threshold=self.feature.decoder.threshold, write=self.feature.answer_text)

    def columns(self) -> dict[str, ColumnType]:
        scored: dict[str, ColumnType] = {f"{self.feature.name}_probabilities": "json"}
        return super().columns() | (scored if self.feature.has_scores else {})

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        cells = super().cells(value, raw, scores=scores)
        if not self.feature.has_scores:
            return cells
        shares = None if scores is None else {label: math.exp(score) for label, score in scores.items()}
        return cells | {f"{self.feature.name}_probabilities": shares}

    def log_probabilities(self, scores: Mapping[str, float] | None) -> Mapping[str, float] | None:
        return scores if self.feature.has_scores else None

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most, known = super().new_tokens(labels, count=count), self.feature.answer_labels(labels)
        if most is not None or not known:
            return most
        return count(self.feature.answer_text(known)) + SPARE_TOKENS


class SetReader(Reader):
    """Recognizes labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self._forms = {form: labels_by_form(self.labels, form) for form in (str, composed, folded)}

    def label_of(self, text: str) -> str | None:
        """Return the label that a text is, or None."""
        return next((labels[form(text)] for form, labels in self._forms.items() if form(text) in labels), None)

    def in_order(self, texts: Iterable[str]) -> list[str]:
        """Return the labels that the texts name. Raise ReadError for a text that is none."""
        named = set()
        for text in texts:
            label = self.label_of(text)
            if label is None:
                raise ReadError(f"{clip(text)} is none of the labels {', '.join(self.labels)}")
            named.add(label)
        return [label for label in self.labels if label in named]


def folded(text: str) -> str:
    """Return the composed text in one case."""
    return composed(text).casefold()


class ArrayReader(SetReader):
    """Reads a JSON array of labels."""

    def read(self, text: str) -> list[str]:
        """Return the labels of the first array that holds only labels. Raise ReadError."""
        labels: list[str] = find_json(text, check=self.read_member)
        return labels

    def read_member(self, member: Any) -> list[str]:
        """Return the labels of an array. Raise ReadError."""
        if not isinstance(member, list):
            raise ReadError(f"the answer is not a JSON array of labels: {clip(compact_json(member))}")
        return self.in_order([item.strip() if isinstance(item, str) else compact_json(item) for item in member])


class CommaReader(SetReader):
    """Reads labels with commas between."""

    def read(self, text: str) -> list[str]:
        """Return the labels; a blank text has none. Raise ReadError."""
        parts = [part.strip() for part in text.split(",")]
        return self.in_order(map(self._bare, filter(None, parts)))

    def _bare(self, part: str) -> str:
        """Return a part without marks around it, unless they belong to a label."""
        candidates = (part, part.rstrip("."), part.strip(MARKS))
        return next((text for text in candidates if self.label_of(text) is not None), part)


class SetMetrics(Metrics):
    """exact_match; micro_f1 over all labels of all rows; macro_f1, the mean over labels that occur as reference or
    answer; jaccard, the mean over rows of the shared labels among all labels of reference and answer. With scored
    labels also auroc and average_precision, the means over labels.

    An unreadable answer is an empty set that is wrong. If no label occurs at all, both F1 scores are the share of exact
    matches.
    """

    def __init__(self, *, scored: bool) -> None:
        self.right = 0
        self.counts = LabelCounts()
        self.shares: Counter[tuple[int, int]] = Counter()
        self.scores = LabelScores() if scored else None

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        true_labels, answer = set(truth), set(value) if valid else set()
        shared, united = true_labels & answer, true_labels | answer
        self.counts.add(true_labels, answer, shared)
        right = valid and true_labels == answer
        self.shares[(1, 1) if right else (len(shared), max(1, len(united)))] += 1
        self.right += right
        return right

    def add_scores(self, truth: Any, scores: Mapping[str, float] | None) -> None:
        if self.scores is not None:
            self.scores.add(truth, scores)

    def results(self, rows: int) -> dict[str, float]:
        exact, micro, macro_f1 = self.right / rows, self.counts.micro(), self.counts.macro_f1()
        jaccard = exact_sum(count * shared / united for (shared, united), count in self.shares.items()) / rows
        metrics = {
            "exact_match": exact,
            "micro_f1": exact if micro is None else micro["f1"],
            "macro_f1": exact if macro_f1 is None else macro_f1,
            "jaccard": jaccard,
        }
        return metrics if self.scores is None else metrics | self.scores.means(self.scores.by_label())

    def details(self) -> dict[str, Any]:
        """Return `per_label`, the metrics of each label."""
        return {"per_label": label_table(self.counts, self.scores)}
