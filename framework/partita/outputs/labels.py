"""Find the label in an answer.

Configured rules are applied first, in their order. Labels without a rule match if the answer equals the label, else
if it is the only label that occurs in the answer as a whole word. If one label contains another ("not good" and
"good"), the longer one counts. Matching ignores case, unless two labels differ only in case.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

from partita.outputs.reading import ReadError, clipped
from partita_schema.features import Match

MARKS = " \t\r\n.,;:!?\"'`*()[]<>\u2018\u2019\u201c\u201d"
"""Characters that may surround a label."""


class LabelReader:
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
            raise ReadError(f"several labels in {clipped(text)}: {', '.join(standing)}")
        raise ReadError(f"no label in {clipped(text)}")

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
