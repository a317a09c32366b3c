"""The output type set: find the labels in an answer.

The answer is a JSON array, alone or surrounded by text, or labels with commas between. Case is ignored, unless two
labels differ only in case. A label that is not in the list makes the answer unreadable, because the rest would be a
guess; one that is named twice counts once.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from partita.outputs.base import OutputType, Reader, ReadError, clip, exact_sum
from partita.outputs.find_json import find_json
from partita_schema.cells import compact_json
from partita_schema.sections.outputs.set import SetOutput

MARKS = ".\"'`"
"""Characters that may surround a label between commas."""
SPARE_TOKENS = 16
"""Extra tokens in addition to all labels, for an answer such as "The topics are: ..."."""


class SetType(OutputType[SetOutput]):
    """A list of labels, in the order of all labels."""

    column: ClassVar = "json"

    def reader(self, labels: Sequence[str]) -> Reader:
        return CommaReader(labels) if self.feature.answer_format == "comma" else ArrayReader(labels)

    def metrics(self) -> "SetMetrics":
        return SetMetrics()

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most, known = super().new_tokens(labels, count=count), self.feature.answer_labels(labels)
        if most is not None or not known:
            return most
        return count(self.feature.answer_text(known)) + SPARE_TOKENS


class SetReader(Reader):
    """Recognizes labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self._exact = frozenset(labels)
        folded = Counter(label.casefold() for label in labels)
        self._folded = {label.casefold(): label for label in labels if folded[label.casefold()] == 1}

    def label_of(self, text: str) -> str | None:
        """Return the label that a text is, or None."""
        return text if text in self._exact else self._folded.get(text.casefold())

    def in_order(self, texts: Iterable[str]) -> list[str]:
        """Return the labels that the texts name. Raise ReadError for a text that is none."""
        named = set()
        for text in texts:
            label = self.label_of(text)
            if label is None:
                raise ReadError(f"{clip(text)} is none of the labels {', '.join(self.labels)}")
            named.add(label)
        return [label for label in self.labels if label in named]


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


class SetMetrics:
    """exact_match; micro_f1 over all labels of all rows; macro_f1, the mean over labels that occur as reference or
    answer; jaccard, the mean over rows of the shared labels among all labels of reference and answer.

    An unreadable answer is an empty set that is wrong. If no label occurs at all, both F1 scores are the share of exact
    matches.
    """

    def __init__(self) -> None:
        self.right = 0
        self.true_counts: Counter[str] = Counter()
        self.answer_counts: Counter[str] = Counter()
        self.shared_counts: Counter[str] = Counter()
        self.shares: Counter[tuple[int, int]] = Counter()

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        true_labels, answer = set(truth), set(value) if valid else set()
        shared, united = true_labels & answer, true_labels | answer
        self.true_counts.update(true_labels)
        self.answer_counts.update(answer)
        self.shared_counts.update(shared)
        right = valid and true_labels == answer
        self.shares[(1, 1) if right else (len(shared), max(1, len(united)))] += 1
        self.right += right
        return right

    def results(self, rows: int) -> dict[str, float]:
        exact = self.right / rows
        labels = sorted(self.true_counts.keys() | self.answer_counts.keys())
        named = self.true_counts.total() + self.answer_counts.total()
        jaccard = exact_sum(count * shared / united for (shared, united), count in self.shares.items()) / rows
        return {
            "exact_match": exact,
            "micro_f1": 2 * self.shared_counts.total() / named if named else exact,
            "macro_f1": math.fsum(map(self._f1, labels)) / len(labels) if labels else exact,
            "jaccard": jaccard,
        }

    def _f1(self, label: str) -> float:
        return 2 * self.shared_counts[label] / (self.true_counts[label] + self.answer_counts[label])
