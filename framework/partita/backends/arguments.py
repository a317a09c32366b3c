"""Checks of the arguments that users pass to the methods of `Model`."""

import operator
import os
from pathlib import Path
from typing import Any

from partita_schema.errors import DataError, shortened


def count_of(name: str, value: Any) -> int | None:
    """Return an argument that is a number of rows or tokens, or None. Raise DataError if it is something else."""
    if value is None:
        return None
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise DataError(f"{name} is {shortened(repr(value))}; write a whole number of at least 1")
    return count


def path_of(name: str, value: Any) -> Path:
    """Return an argument that is a path. Raise DataError if it is something else."""
    if not isinstance(value, str | os.PathLike):
        raise DataError(f"{name} is {shortened(repr(value))}; write a path")
    return Path(value)


def texts_of(prompts: Any) -> list[str]:
    """Return prompts as a list. Raise DataError if they are no texts."""
    texts = list(prompts) if hasattr(prompts, "__iter__") else [prompts]
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise DataError(f"a prompt is {shortened(repr(wrong[0]))}; write a text, or a list of texts")
    return texts
