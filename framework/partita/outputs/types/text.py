"""The output type text: the whole answer."""

import re
import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from partita.outputs.base import Metrics, OutputType, Reader, exact_sum
from partita.outputs.metrics.rouge import ngram_f1, subsequence_f1
from partita_schema.sections.outputs.text import TextOutput

ROUGE: Mapping[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "rouge_1": partial(ngram_f1, n=1),
    "rouge_2": partial(ngram_f1, n=2),
    "rouge_l": subsequence_f1,
}
"""ROUGE metrics of the words of a truth and of an answer, by name."""

MARK = "\u0300"
"""Takes the place of each combining mark, which is not a word character of `re`."""
WORD = re.compile(rf"[^\W_](?:[^\W_]|{MARK})*")


class TextType(OutputType[TextOutput]):
    """A text."""

    def reader(self, labels: Sequence[str]) -> Reader:
        return TextReader()

    def metrics(self) -> "TextMetrics":
        return TextMetrics()

    def closest(self, truths: Sequence[Any], value: Any) -> int:
        """Return the index of the correct answer that the text equals, or has the highest ROUGE-L with."""
        text, words = str(value).strip(), words_of(str(value))
        texts = [str(truth).strip() for truth in truths]
        return max(
            range(len(texts)),
            key=lambda index: (texts[index] == text, subsequence_f1(words_of(texts[index]), words)),
        )

    def new_tokens(self, labels: Sequence[str], *, count: Callable[[str], int]) -> int | None:
        most = self.feature.decoder.max_new_tokens
        return super().new_tokens(labels, count=count) if most is None else most


class TextReader(Reader):
    """Reads the whole text."""

    def read(self, text: str) -> str:
        """Return the text without surrounding white space."""
        return text.strip()


class TextMetrics(Metrics):
    """exact_match; rouge_1, rouge_2 and rouge_l (Lin 2004, 0 to 1), and bleu (Papineni et al. 2002, corpus, 0 to 100).

    With several correct answers, each ROUGE is the highest one, and BLEU has several references.

    BLEU uses only the n-gram orders that the answers have: answers shorter than four words have no 4-grams and would
    score 0 even if they are right. With longer answers it is the usual score.
    """

    def __init__(self) -> None:
        from sacrebleu.metrics import BLEU

        self.right = 0
        self.rouge = {name: array("d") for name in ROUGE}
        self.bleu = BLEU(effective_order=True)
        self.matches, self.totals = [0] * 4, [0] * 4
        self.answer_length = self.truth_length = 0

    def add(self, truth: Any, value: Any, *, valid: bool) -> bool:
        return self.add_any([truth], value, closest=0, valid=valid)

    def add_any(self, truths: Sequence[Any], value: Any, *, closest: int, valid: bool) -> bool:
        """Add one row, which is compared with all of its correct answers.

        Args:
            truths: The correct answers.
            value: The text; only meaningful if `valid`.
            closest: Not used.
            valid: Whether there is a text.
        """
        text, references = str(value) if valid else "", [str(truth).strip() for truth in truths]
        words, words_of_references = words_of(text), [words_of(reference) for reference in references]
        rouge = {name: max(score(one, words) for one in words_of_references) for name, score in ROUGE.items()}
        for name, score in rouge.items():
            self.rouge[name].append(score)
        counts = self.bleu.sentence_score(text, references)
        self.of_row = rouge | {"bleu": [*counts.counts, *counts.totals, counts.sys_len, counts.ref_len]}
        self.matches = [a + b for a, b in zip(self.matches, counts.counts, strict=True)]
        self.totals = [a + b for a, b in zip(self.totals, counts.totals, strict=True)]
        self.answer_length += counts.sys_len
        self.truth_length += counts.ref_len
        right = valid and text.strip() in references
        self.right += right
        return right

    def results(self, rows: int) -> dict[str, float]:
        bleu = self.bleu.compute_bleu(
            self.matches,
            self.totals,
            self.answer_length,
            self.truth_length,
            smooth_method="exp",
            effective_order=True,
        )
        rouge = {name: exact_sum(scores) / rows for name, scores in self.rouge.items()}
        score = min(100.0, float(bleu.score))  # exp(log(100)) is a little more
        return {"exact_match": self.right / rows, **rouge, "bleu": score}


def words_of(text: str) -> list[str]:
    """Return the lowercased runs of letters and digits, with their combining marks.

    On English, they are those of the library rouge-score; letters of other scripts count as letters, too.
    """
    text = unicodedata.normalize("NFC", text.lower())
    shape = "".join(MARK if unicodedata.category(letter) in ("Mn", "Mc") else letter for letter in text)
    return [text[word.start() : word.end()] for word in WORD.finditer(shape)]
