"""The output type category: find the label in an answer.

Configured rules are applied first, in their order. Labels without a rule match if the answer equals the label, else
if it is the only label that occurs in the answer as a whole word. If one label contains another ("not good" and
"good"), the longer one counts. Matching ignores case, the way a dash or an accented letter is encoded, and whether a
label has a hyphen or a space between words, unless two labels differ only in that. A number at the start or end of
a label does not match inside a longer one (1 in "-1" or "0.1").
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.outputs.base import ColumnType, Metrics, OutputType, Reader, ReadError, clip
from partita.outputs.metrics.label_counts import LabelCounts
from partita.outputs.metrics.label_scores import LabelScores, label_table
from partita.outputs.types.label_forms import composed, labels_by_form
from partita.outputs.types.number import DASHES
from partita_schema.sections.outputs.category import CategoryOutput, Match

if TYPE_CHECKING:
    from partita.lm.heads.base import Head

MARKS = " \t\r\n.,;:!?\"'`*()[]<>\u2018\u2019\u201c\u201d"
"""Characters that may surround a label."""
HYPHENS = str.maketrans(dict.fromkeys(DASHES, "-"))
LEADING_SIGN = re.compile(r"\A(\s*-)[^\S\n](?=[0-9])")
JOINT = re.compile(r"(?<=\w)(?!(?<=[0-9])[-\s][0-9])[-\s](?=\w)")
"""A hyphen or a space between words."""
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
        self._forms = {form: labels_by_form(plain, form) for form in (str, _plain, _folded, _joined)}
        any_case, any_joint = (set(self._forms[form].values()) for form in (_folded, _joined))
        self._words = [
            (label, _word_pattern(_plain(label), any_case=label in any_case, any_joint=label in any_joint))
            for label in plain
        ]

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
        folded = composed(text).casefold()
        for label, match, pattern in self._rules:
            if match.type == "exact":
                holds = folded.strip() == composed(match.value).strip().casefold()
            elif match.type == "contains":
                holds = composed(match.value).casefold() in folded
            else:
                holds = pattern is not None and pattern.search(text) is not None
            if holds:
                return label
        return None

    def _equal(self, text: str) -> str | None:
        # A point at the start may be a decimal one.
        for candidate in (text.strip(), text.rstrip(MARKS).lstrip(MARKS.replace(".", ""))):
            for form, labels in self._forms.items():
                label = labels.get(form(candidate))
                if label is not None:
                    return label
        return None

    def _standing(self, text: str) -> list[str]:
        """Return the labels that occur in the text as whole words, in order, except those inside a longer one."""
        text = _plain(text)
        labels: dict[tuple[int, int], list[str]] = {}
        for label, pattern in self._words:
            for match in pattern.finditer(text):
                labels.setdefault(match.span(), []).append(label)
        standing, furthest = set(), -1
        for start, end in sorted(labels, key=lambda span: (span[0], -span[1])):
            if end > furthest:
                standing.update(labels[start, end])
                furthest = end
        return [label for label in self.labels if label in standing]


def _plain(text: str) -> str:
    """Return the composed text with hyphens for dashes, and no space after the sign of a number at its start."""
    return LEADING_SIGN.sub(r"\1", composed(text).translate(HYPHENS))


def _folded(text: str) -> str:
    return _plain(text).casefold()


def _joined(text: str) -> str:
    return JOINT.sub(" ", _folded(text))


def _rule_pattern(match: Match) -> re.Pattern[str] | None:
    return re.compile(match.value, re.IGNORECASE) if match.type == "regex" else None


def _word_pattern(label: str, *, any_case: bool, any_joint: bool) -> re.Pattern[str]:
    """Return the pattern of a label as a whole word, or as a whole number where it starts or ends with a digit."""
    before = r"(?<!\w)" if _needs_boundary(label[0]) else ""
    after = r"(?!\w)" if _needs_boundary(label[-1]) else ""
    if re.match(r"[-+]?[0-9]", label):
        # A hyphen after a letter ("class-1") is no sign.
        before = r"(?<![\w.])(?:(?<!-)|(?<=[^\W\d_]-))(?<![0-9][,+])"
    if label[-1] in "0123456789":
        after = r"(?!\w|[-+.,][0-9])"
    words = JOINT.split(label) if any_joint else [label]
    return re.compile(before + r"[-\s]".join(map(re.escape, words)) + after, re.IGNORECASE if any_case else 0)


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
    total = sum(weights.values())
    return {label: weight / total for label, weight in weights.items()}
