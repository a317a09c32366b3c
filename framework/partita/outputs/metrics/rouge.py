"""ROUGE (Lin 2004, sections 2 and 3): shared words, pairs of words and common subsequences of a truth and an answer.

The library rouge-score gives the same numbers (tests/framework/outputs/test_rouge.py). Importing it takes a second,
because it imports nltk for a stemmer.
"""

from collections import Counter
from collections.abc import Sequence


def ngram_f1(truth: Sequence[str], answer: Sequence[str], n: int) -> float:
    """Return ROUGE-N: the F1 score of the n-grams that both texts have.

    Args:
        truth: Words of the truth.
        answer: Words of the answer.
        n: Number of words of an n-gram.
    """
    wanted, found = ngrams(truth, n), ngrams(answer, n)
    return f1((wanted & found).total(), wanted=wanted.total(), found=found.total())


def ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of a text."""
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def subsequence_f1(truth: Sequence[str], answer: Sequence[str]) -> float:
    """Return ROUGE-L: the F1 score of the words in a longest common subsequence."""
    return f1(common_subsequence(truth, answer), wanted=len(truth), found=len(answer))


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of a longest common subsequence.

    A row of the usual table is kept in the bits of an integer (Hyyrö 2004, "Bit-parallel LCS-length computation
    revisited"): bit i is 0 if the length grows at word i.
    """
    places: dict[str, int] = {}
    for index, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << index
    every = (1 << len(one)) - 1
    row = every
    for word in other:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & every
    return len(one) - row.bit_count()


def f1(shared: int, *, wanted: int, found: int) -> float:
    """Return the harmonic mean of precision and recall, or 0 without shared items.

    Args:
        shared: Number of items that are in both texts.
        wanted: Number of items of the truth.
        found: Number of items of the answer.
    """
    if not shared:
        return 0.0
    precision, recall = shared / found, shared / wanted
    return 2 * precision * recall / (precision + recall)
