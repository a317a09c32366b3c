"""Infer the kind of a column from the first rows of a file."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from partita_schema.cells import CellError, plain_text
from partita_schema.dialogues.formats import CHATML_START

MAX_LABELS = 20
"""Maximum number of distinct values of a category."""
MAX_NAMED_LABELS = 300
"""Maximum number of distinct values of a category in a column named like one."""
ROWS_PER_LABEL = 3
"""Minimum mean number of rows per value of a category with many values."""
LABEL_CHARACTERS = 60
"""Maximum number of characters of a label."""

NUMBER_NAMES = ("score", "rating", "stars", "grade", "price", "amount")
"""Names of columns whose few distinct integers are numbers, not classes."""
LABEL_NAMES = ("label", "labels", "class", "category", "intent", "topic", "emotion", "sentiment", "team", "target")
"""Names of columns with the label of a text."""
KEY_NAMES = ("id", "idx", "index", "key", "uuid", "guid")
"""Names of columns that only identify rows."""
ABOUT_NAMES = (
    *("url", "uri", "link", "date", "time", "datetime", "timestamp", "created_at", "updated_at"),
    *("meta", "metadata", "file", "filename", "file_name", "path", "split", "license"),
)
"""Names of columns that say where a row is from."""
ABOUT_VALUE = re.compile(r"(\w+://\S+|\d{4}-\d\d?-\d\d?([T ][\d:.+Z-]*)?|\d\d?[./]\d\d?[./]\d{2,4})")
"""An address or a date."""
SEPARATORS = (";", "|", ",")
"""Separators of labels in text, the likeliest first."""
MESSAGE_KEYS = ({"role"}, {"from"}, {"speaker"}, {"text", "labels"}, {"text", "label"})
"""Keys of a message, in the formats of dialogues; the last are ParlAI's, and those of segments."""

Kind = Literal["text", "category", "number", "json", "set", "tags", "dialogue", "key", "empty"]
"""What a column holds; a key only identifies a row, or says where it is from."""


@dataclass(frozen=True)
class Column:
    """Properties of a column, from the first rows."""

    name: str
    kind: Kind
    missing: bool
    """Whether a row has no value in it."""
    labels: tuple[str, ...] = ()
    """Values of a category or labels of a set, the most frequent first."""
    separator: str | None = None
    """What separates the labels of a set in text; None if they are lists."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value, if all values are numbers."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """An example object, if the column is JSON."""
    only_value: str | None = None
    """The value that all rows share; None if they differ or there is only one row."""
    words: str | None = None
    """The column of the words, if this one has their tags."""
    largest_tag: int | None = None
    """The largest tag, if tags are numbers, which stand for labels whose names are not known; None if they are text."""
    characters: int = 0
    """Mean length of the values as text."""
    present: int = 0
    """Number of rows with a value in it."""


def column_of(name: str, values: Sequence[Any]) -> Column:
    """Return the properties of a column with these values."""
    cells = [(cell, value) for cell, value in zip(values, map(parsed, values), strict=True) if value is not None]
    present = [value for _, value in cells]
    missing = len(present) < len(values)
    if not present:
        return Column(name, "empty", missing)
    counts = Counter(label_text(cell) for cell, _ in cells)
    only_value = next(iter(counts)) if len(counts) == 1 < len(present) else None
    characters = sum(len(text) * count for text, count in counts.items()) // len(present)
    found = column_of_kind(name, present, counts, missing=missing)
    return replace(found, only_value=only_value, characters=characters, present=len(present))


def label_text(cell: Any) -> str:
    """Return a cell as the label that a category reads from it: text that looks like a number stays as it is."""
    try:
        return plain_text(cell).strip()
    except CellError:
        return str(cell)


def column_of_kind(name: str, present: Sequence[Any], counts: Counter[str], *, missing: bool) -> Column:
    """Return the kind of a column and what its feature needs.

    Args:
        name: Name of the column.
        present: Parsed values, without missing ones.
        counts: Number of occurrences of each value, as a label.
        missing: Whether a row has no value.
    """
    named_key = name.lower() in KEY_NAMES or name.lower().endswith("_id")
    if len(counts) == len(present) > 1 and (named_key or is_numbering(present)):
        return Column(name, "key", missing)
    if is_about_the_row(name, present):
        return Column(name, "key", missing)
    if all(isinstance(value, list) and value and is_message(value[0]) for value in present):
        return Column(name, "dialogue", missing)
    if all(isinstance(value, str) and value.lstrip().startswith(CHATML_START) for value in present):
        return Column(name, "dialogue", missing)
    labels, separator = labels_of_sets(present)
    if labels:
        return Column(name, "set", missing, labels=labels, separator=separator)
    if all(isinstance(value, dict | list) for value in present):
        return Column(name, "json", missing, example=next((one for one in present if isinstance(one, dict)), {}))
    numbers = [number for number in map(number_of, present) if number is not None]
    bounds = (min(numbers), max(numbers)) if len(numbers) == len(present) else None
    if bounds and (len(counts) > MAX_LABELS or is_measured(name, numbers)):
        return Column(name, "number", missing, bounds=bounds)
    repeated = len(present) >= ROWS_PER_LABEL * len(counts)
    most = MAX_NAMED_LABELS if name.lower() in LABEL_NAMES and repeated else MAX_LABELS
    if len(counts) <= min(most, max(1, len(present) // 2)) and max(map(len, counts)) <= LABEL_CHARACTERS:
        labels = tuple(label for label, _ in counts.most_common())
        return Column(name, "category", missing, labels=labels, bounds=bounds)
    return Column(name, "number" if bounds else "text", missing, bounds=bounds)


def labels_of_sets(values: Sequence[Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the labels of values that are sets of a few labels, the most frequent first, and what separates them.

    The labels are empty if the values are something else. Lists have no separator. Text is sets only if it combines its
    labels: in "Oslo, Norway" and "Rome, Italy" are more parts than values.
    """
    if all(isinstance(value, list) and all(isinstance(item, str) for item in value) for value in values):
        sets = [[item.strip() for item in value] for value in values]
        return few_labels(sets, most=max(1, sum(map(len, values)) // 2)), None
    if all(isinstance(value, str) for value in values):
        for separator in SEPARATORS:
            if any(separator in value for value in values):
                sets = [[part.strip() for part in value.split(separator)] for value in values]
                return few_labels(sets, most=len(set(values)) - 1), separator
    return (), None


def few_labels(sets: Sequence[Sequence[str]], *, most: int) -> tuple[str, ...]:
    """Return the distinct labels, the most frequent first; empty if there are more than `most`, or long ones."""
    counts = Counter(label for labels in sets for label in labels if label)
    few = 1 < len(counts) <= min(most, MAX_LABELS) and max(map(len, counts)) <= LABEL_CHARACTERS
    return tuple(label for label, _ in counts.most_common()) if few else ()


def parsed(value: Any) -> Any:
    """Return the value of a cell; text that is a number, an object or a list is parsed. None if the cell is empty."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text:
        return None
    if text[0] in "[{" or text.lstrip("+-")[:1].isdigit():
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(keys <= set(value) for keys in MESSAGE_KEYS)


def number_of(value: Any) -> float | None:
    """Return the value as a float; None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_about_the_row(name: str, values: Sequence[Any]) -> bool:
    """Return whether a column says where rows are from: an address, a date, metadata."""
    if name.lower() in ABOUT_NAMES:
        return True
    return all(isinstance(value, str) and ABOUT_VALUE.fullmatch(value.strip()) is not None for value in values)


def is_numbering(values: Sequence[Any]) -> bool:
    """Return whether the values number the rows."""
    return all(isinstance(value, int) and value - index == values[0] for index, value in enumerate(values))


def is_measured(name: str, numbers: Sequence[float]) -> bool:
    """Return whether numbers that repeat are amounts, not classes."""
    return any(word in name.lower() for word in NUMBER_NAMES) or any(number != int(number) for number in numbers)
