"""The output type category: find the label in an answer.

Configured rules are applied first, in their order. Labels without a rule match if the answer equals the label, else
if it is the only label that occurs in the answer as a whole word. If one label contains another ("not good" and
"good"), the longer one counts. Matching ignores case, unless two labels differ only in case.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.outputs.base import ColumnType, Metrics, OutputType, Reader, ReadError, clip
from partita.outputs.label_counts import LabelCounts
from partita.outputs.label_scores import LabelScores, label_table
from partita_schema.sections.outputs.category import CategoryOutput, Match

if TYPE_CHECKING:
    from partita.lm.heads.base import Head

MARKS = " \t\r\n.,;:!?\"'`*()[]<>\u2018\u2019\u201c\u201d"
"""Characters that may surround a label."""
SPARE_TOKENS = 8
"""Extra tokens around a label, for an answer such as "The label is positive."."""


class CategoryType(OutputType[CategoryOutput]):
    """One label; with scored labels or a head also their probabilities."""

    def reader(self, labels: Sequence[str]) -> Reader:
        rules, fallback = self.feature.decoder.match or {}, self.feature.fallback_label
        if self.feature.preprocessing.lowercase:
            rules = {label.lower(): rule for label, rule in rules.items()}
            fallback = fallback.lower() if fallback else None
        return LabelReader(labels, rules=rules, fallback=fallback)

    def metrics(self) -> "CategoryMetrics":
        return CategoryMetrics(scored=self.feature.has_scores)

    def head(self, labels: Sequence[str]) -> "Head":
        from partita.lm.heads.base import ClassificationHead

        return ClassificationHead(tuple(labels))

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most = super().new_tokens(labels, count=count)
        if most is not None:
            return most
        rules = (self.feature.decoder.match or {}).values()
        sought = [*(self.feature.labels or labels), *(rule.value for rule in rules if rule.type != "regex")]
        return max(map(count, sought)) + SPARE_TOKENS if sought else None

    def columns(self) -> dict[str, ColumnType]:
        name = self.feature.name
        scored: dict[str, ColumnType] = {f"{name}_probability": "number", f"{name}_probabilities": "json"}
        return super().columns() | (scored if self.feature.has_scores else {})

    def cells(self, value: Any, raw: str, *, scores: Mapping[str, float] | None) -> dict[str, Any]:
        cells = super().cells(value, raw, scores=scores)
        if not self.feature.has_scores:
            return cells
        name, shares = self.feature.name, probabilities(scores)
        return cells | {
            f"{name}_probability": max(shares.values()) if shares else None,
            f"{name}_probabilities": shares,
        }

    def log_probabilities(self, scores: Mapping[str, float] | None) -> Mapping[str, float] | None:
        return log_probabilities(scores) if self.feature.has_scores else None


class LabelReader(Reader):
    """Finds a label in a text."""

    def __init__(
        self, labels: Sequence[str], *, rules: Mapping[str, Match] | None = None, fallback: str | None = None
    ) -> None:
        self.labels = tuple(dict.fromkeys(labels))
        self.fallback = fallback
        self._rules = [(label, match, _rule_pattern(match)) for label, match in (rules or {}).items()]
        plain = [label for label in self.labels if label not in (rules or {})]
        folded = Counter(label.casefold() for label in plain)
        self._exact = {label: label for label in plain}
        self._folded = {label.casefold(): label for label in plain if folded[label.casefold()] == 1}
        self._words = [(label, _word_pattern(label, any_case=folded[label.casefold()] == 1)) for label in plain]

    def read(self, text: str) -> str:
        """Return the label, or the fallback. Raise ReadError if there is neither."""
        label = self._by_rule(text) or self._equal(text)
        if label is not None:
            return label
        standing = self._standing(text)
        if len(standing) == 1:
            return standing[0]
        if self.fallback is not None:
            return self.fallback
        if standing:
            raise ReadError(f"several labels in {clip(text)}: {', '.join(standing)}")
        raise ReadError(f"no label in {clip(text)}")

    def missing(self, reason: str) -> Any:
        """Return the fallback. Raise ReadError if there is none."""
        return super().missing(reason) if self.fallback is None else self.fallback

    def _by_rule(self, text: str) -> str | None:
        stripped = text.strip().casefold()
        for label, match, pattern in self._rules:
            if match.type == "exact":
                holds = stripped == match.value.strip().casefold()
            elif match.type == "contains":
                holds = match.value.casefold() in text.casefold()
            else:
                holds = pattern is not None and pattern.search(text) is not None
            if holds:
                return label
        return None

    def _equal(self, text: str) -> str | None:
        for candidate in (text.strip(), text.strip(MARKS)):
            label = self._exact.get(candidate) or self._folded.get(candidate.casefold())
            if label is not None:
                return label
        return None

    def _standing(self, text: str) -> list[str]:
        """Return the labels that occur in the text as whole words, in order, except those inside a longer one."""
        spans = [(label, *match.span()) for label, pattern in self._words for match in pattern.finditer(text)]

        def inside(start: int, end: int) -> bool:
            return any(low <= start and end <= high and high - low > end - start for _, low, high in spans)

        return list(dict.fromkeys(label for label, start, end in spans if not inside(start, end)))


def _rule_pattern(match: Match) -> re.Pattern[str] | None:
    return re.compile(match.value, re.IGNORECASE) if match.type == "regex" else None


def _word_pattern(label: str, *, any_case: bool) -> re.Pattern[str]:
    before = r"(?<!\w)" if _needs_boundary(label[0]) else ""
    after = r"(?!\w)" if _needs_boundary(label[-1]) else ""
    return re.compile(before + re.escape(label) + after, re.IGNORECASE if any_case else 0)


def _needs_boundary(character: str) -> bool:
    """Return whether words ending in this character have boundaries: not in Chinese or Japanese, nor after "C++"."""
    word = character.isalnum() or character == "_"
    return word and unicodedata.east_asian_width(character) not in "WF"


class CategoryMetrics(Metrics):
    """accuracy; macro_f1 and weighted_f1 over all labels that occur as reference or answer. With scored labels also
    auroc and average_precision, the means over labels of one label against all others.
    """

    def __init__(self, *, scored: bool) -> None:
        self.pairs: Counter[tuple[str, str | None]] = Counter()
        self.scores = LabelScores() if scored else None

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        self.pairs[str(truth), str(value) if valid else None] += 1
        return valid and str(value) == str(truth)

    def add_scores(self, truth: Any, scores: Mapping[str, float] | None) -> None:
        if self.scores is not None:
            self.scores.add({str(truth)}, log_probabilities(scores))

    def results(self, rows: int) -> dict[str, float]:
        """Return the accuracy and the means of the labels' metrics.

        An unreadable answer counts as a miss but is not a label itself, because its F1 would always be 0.
        """
        counts = self._counts()
        metrics = {
            "accuracy": counts.shared.total() / rows,
            "macro_f1": counts.macro_f1() or 0.0,
            "weighted_f1": counts.weighted_f1(),
        }
        return metrics if self.scores is None else metrics | self.scores.means(self.scores.by_label())

    def details(self) -> dict[str, Any]:
        """Return `per_label`, the metrics of each label, and `confusion`, the number of rows of each pair of labels.

        A pair has the keys `correct`, `answer`, which is None if there is no readable answer, and `rows`.
        """
        pairs = sorted(self.pairs.items(), key=lambda pair: (pair[0][0], pair[0][1] or "", pair[0][1] is None))
        confusion = [{"correct": truth, "answer": answer, "rows": count} for (truth, answer), count in pairs]
        return {"per_label": label_table(self._counts(), self.scores), "confusion": confusion}

    def _counts(self) -> LabelCounts:
        counts = LabelCounts()
        for (truth, answer), count in self.pairs.items():
            counts.true[truth] += count
            if answer is not None:
                counts.answered[answer] += count
                counts.shared[truth] += count * (answer == truth)
        return counts


def log_probabilities(scores: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the normalized log probabilities of labels, from scores that differ from them by a constant."""
    if scores is None:
        return None
    best = max(scores.values())
    total = best + math.log(math.fsum(math.exp(score - best) for score in scores.values()))
    return {label: score - total for label, score in scores.items()}


def probabilities(scores: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the normalized probabilities of labels from their log probabilities."""
    if scores is None:
        return None
    best = max(scores.values())
    weights = {label: math.exp(score - best) for label, score in scores.items()}
    return {label: weight / sum(weights.values()) for label, weight in weights.items()}
