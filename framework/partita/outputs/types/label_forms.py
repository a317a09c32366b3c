"""Forms of labels: texts of the same form are the same label, unless two labels share it."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence


def composed(text: str) -> str:
    """Return the text with each accent as a part of its letter."""
    return unicodedata.normalize("NFC", text)


def labels_by_form(labels: Sequence[str], form: Callable[[str], str]) -> dict[str, str]:
    """Return the labels by a form of theirs, without those that share it."""
    counts = Counter(map(form, labels))
    return {form(label): label for label in labels if counts[form(label)] == 1}
