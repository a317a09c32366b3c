"""Texts as words, and the tags of words.

A row holds words, as a list, or a text, which is split into words. It holds tags, one for each word, or spans of
characters with labels, which become tags of the scheme IOB2.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from partita_schema.cells import CellError, parse_cell, plain_text, shown, text_reader
from partita_schema.common.text import counted

Splitting = Literal["punctuation", "whitespace"]
OUTSIDE = "O"
"""Tag of a word that is in no entity."""
UNSPACED = (("\u3040", "\u30ff"), ("\u3400", "\u4dbf"), ("\u4e00", "\u9fff"), ("\uf900", "\ufaff"))
"""Ranges of Japanese and Chinese characters, each of which is a word."""


class Span(NamedTuple):
    """Characters of a text with a label."""

    start: int
    end: int
    """One past the last character."""
    label: str


class WordText(str):
    """A text that knows its words."""

    spans: tuple[tuple[int, int], ...]
    """Start and end of each word."""

    def __new__(cls, text: str, spans: Sequence[tuple[int, int]]) -> "WordText":
        """Create a text with words.

        Args:
            text: The text.
            spans: Start and end of each word, in order.
        """
        word_text = super().__new__(cls, text)
        word_text.spans = tuple(spans)
        return word_text

    def __reduce__(self) -> tuple[Any, ...]:
        return WordText, (str(self), self.spans)

    @property
    def words(self) -> list[str]:
        """The words."""
        return [self[start:end] for start, end in self.spans]


class WordTags(list[str]):
    """Tags of words that know which spans of characters they cover beyond their ends."""

    widened: tuple[str, ...] = ()
    """Each span that begins or ends inside a word, with the words that have its label."""


def read_words(value: Any, *, splitting: Splitting, lowercase: bool = False) -> WordText:
    """Return the words of a cell: a list, also as JSON text, or a text. Raise CellError if there are none."""
    read = text_reader(lowercase=lowercase)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = words_in_json(value)
    if not is_list(value):
        text = read(value)
        return require_words(WordText(text, list(word_spans(text, splitting=splitting))))
    words = [read(word) for word in value]
    blank = next((index for index, word in enumerate(words) if not word.strip()), None)
    if blank is not None:
        raise CellError(f"word {blank + 1} is blank")
    ends = [0]
    for word in words:
        ends.append(ends[-1] + len(word) + 1)
    return require_words(WordText(" ".join(words), [(start, end - 1) for start, end in pairwise(ends)]))


def words_in_json(text: str) -> Any:
    """Return the list in a text that begins like one, or the text itself if it is no list of strings."""
    try:
        value = parse_cell(text)
    except CellError:
        return text
    return value if isinstance(value, list) and all(isinstance(word, str) for word in value) else text


def require_words(words: WordText) -> WordText:
    """Raise CellError if there are no words."""
    if not words.spans:
        raise CellError("there are no words")
    return words


def word_spans(text: str, *, splitting: Splitting) -> Iterator[tuple[int, int]]:
    """Yield start and end of the words of a text.

    With `punctuation`, a word is a run of letters, marks, digits and underscores, and every other visible character is
    a separate word. With `whitespace`, a word is a run of visible characters.
    """
    start, kind_before = 0, ""
    for index, character in enumerate(text):
        kind = "word" if splitting == "whitespace" and not character.isspace() else kind_of(character)
        if kind != kind_before or kind == "single":
            if kind_before:
                yield start, index
            start = index
        kind_before = kind
    if kind_before:
        yield start, len(text)


def kind_of(character: str) -> str:
    """Return `word` for a part of a word, `single` for a separate word, or an empty text for white space."""
    if character.isspace():
        return ""
    if any(first <= character <= last for first, last in UNSPACED):
        return "single"
    is_part = character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
    return "word" if is_part else "single"


def read_tags(value: Any, *, labels: Sequence[str] | None) -> list[str] | list[Span]:
    """Return the tags of a cell, or its spans: a list, JSON text, or tags with spaces between.

    Numbers are indices of `labels`, as in many datasets of the Hub. A span is an object with start, end and label, or a
    list of the three. Raises CellError.
    """
    if isinstance(value, str):
        value = parse_cell(value) if value.lstrip().startswith("[") else value.split()
    if not is_list(value):
        raise CellError(f"{shown(value)} is not a list of tags, nor of spans")
    items = list(value)
    if items and all(isinstance(item, Mapping) or is_list(item) for item in items):
        return [read_span(item) for item in items]
    return [read_tag(item, labels=labels) for item in items]


def read_tag(item: Any, *, labels: Sequence[str] | None) -> str:
    """Return a tag. Raise CellError."""
    if isinstance(item, str):
        return item.strip()
    number = int(item) if hasattr(item, "__index__") and not isinstance(item, bool) else None
    if number is None:
        raise CellError(f"{shown(item)} is not a tag")
    if labels is None:
        raise CellError(f"the tag {number} is an index of labels; write them as decoder: {{labels: [...]}}")
    if not 0 <= number < len(labels):
        raise CellError(f"the tag {number} is not an index of the {len(labels)} labels")
    return labels[number]


def read_span(item: Any) -> Span:
    """Return a span. Raise CellError."""
    if isinstance(item, Mapping):
        missing = [key for key in Span._fields if item.get(key) is None]
        if missing:
            raise CellError(f"the span {shown(item)} has no {missing[0]}; write start, end and label")
        parts = [item[key] for key in Span._fields]
    else:
        parts = list(item)
    if len(parts) != len(Span._fields) or not all(hasattr(part, "__index__") for part in parts[:2]):
        raise CellError(f"{shown(item)} is not a span; write {{start: 0, end: 4, label: NAME}}")
    return Span(int(parts[0]), int(parts[1]), plain_text(parts[2]).strip())


def tags_of(text: WordText, value: Sequence[str] | Sequence[Span], *, splitting: Splitting) -> list[str]:
    """Return one tag for each word. Raise CellError if tags or spans do not fit the words.

    Args:
        text: The words.
        value: Tags, or spans of characters. An empty list stands for no entities.
        splitting: How the text was split, for the error text.
    """
    if not value:
        return [OUTSIDE] * len(text.spans)
    if isinstance(value[0], Span):
        return span_tags(text, [span for span in value if isinstance(span, Span)])
    if len(value) != len(text.spans):
        message = f"{counted(len(value), 'tag')} for {counted(len(text.spans), 'word')}"
        if splitting == "punctuation" and len(value) == len(text.split()):
            message += "; write preprocessing: {words: whitespace}, or the words as a list"
        raise CellError(message)
    return [str(tag) for tag in value]


def span_tags(text: WordText, spans: Sequence[Span]) -> WordTags:
    """Return IOB2 tags: a word that shares a character with a span has its label. Raise CellError."""
    tags, widened = WordTags([OUTSIDE] * len(text.spans)), list[str]()
    for span in sorted(spans):
        where = f"the span from {span.start} to {span.end}"
        if not 0 <= span.start < span.end <= len(text):
            raise CellError(f"{where} is not in the text of {len(text)} characters")
        inside = [index for index, (start, end) in enumerate(text.spans) if start < span.end and end > span.start]
        if not inside:
            raise CellError(f"{where} holds no word")
        if any(tags[index] != OUTSIDE for index in inside):
            raise CellError(f"{where} has a word in common with another span; a word has one tag")
        for index in inside:
            tags[index] = f"I-{span.label}"
        tags[inside[0]] = f"B-{span.label}"
        first, last = text.spans[inside[0]][0], text.spans[inside[-1]][1]
        if first < span.start or last > span.end:
            widened.append(f"{shown(text[span.start : span.end])} in {shown(text[first:last])}")
    tags.widened = tuple(widened)
    return tags


def is_list(value: Any) -> bool:
    """Return whether a value is a list, also one of NumPy."""
    return isinstance(value, list | tuple) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0)
