"""Checkers for what is often asked of a last answer: that it is the right one, holds it, has a form, or means the same.

The right answer is that of a column of the task, where one is named; else what the world calls right for the last
answer (gold); else the task's `answer`. It is the verdict's target as well.
"""

import json
import re
from typing import Any

from partita.data.episode import Episode
from partita.simulation.contract import Verdict


class Exact:
    """Whether the last answer is the right one, but for white space at its ends."""

    def __init__(self, *, column: str | None = None, ignore_case: bool = False, feedback: str = "") -> None:
        """`column` of the task has the right answer. `feedback` is what is said after another one."""
        self.column, self.ignore_case, self.feedback = column, ignore_case, feedback

    def check(self, episode: Episode) -> Verdict:
        """Raises ValueError where nobody knows the right answer."""
        answer, target = last_answer(episode), right_answer(episode, column=self.column)
        fits = self.fits(self.folded(answer), self.folded(target))
        return Verdict(fits, feedback=self.feedback, target=target)

    def folded(self, text: str) -> str:
        """The text as it is compared."""
        return text.strip().casefold() if self.ignore_case else text.strip()

    def fits(self, answer: str, right: str) -> bool:
        """Whether they are the same."""
        return answer == right


class Contains(Exact):
    """Whether the right answer stands somewhere in the last one."""

    def fits(self, answer: str, right: str) -> bool:
        """Whether one is in the other."""
        return right in answer


class Regex:
    """Whether a pattern is found in the last answer."""

    def __init__(self, *, pattern: str, feedback: str = "") -> None:
        """`pattern` is one of Python's; ^ and $ tie it to the ends. Raises re.error where it is none."""
        self.pattern, self.feedback = re.compile(pattern), feedback

    def check(self, episode: Episode) -> Verdict:
        """Needs no right answer, and knows none."""
        return Verdict(self.pattern.search(last_answer(episode)) is not None, feedback=self.feedback)


class JsonEqual:
    """Whether the last answer is JSON that means the same as the right one: order of keys and spaces are free."""

    def __init__(self, *, column: str | None = None, feedback: str = "") -> None:
        """`column` of the task has the right answer, as JSON or as its text."""
        self.column, self.feedback = column, feedback

    def check(self, episode: Episode) -> Verdict:
        """Raises ValueError where nobody knows the right answer, or it is not JSON."""
        answer, target = last_answer(episode), right_answer(episode, column=self.column)
        wanted = json.loads(target)
        try:
            found, is_json = json.loads(answer), True
        except ValueError:
            found, is_json = None, False
        fits = is_json and same(found, wanted)
        return Verdict(fits, feedback=self.feedback, target=target, metrics={"is_json": float(is_json)})


def last_answer(episode: Episode) -> str:
    """What the model said last. Raises ValueError where it has said nothing."""
    if not episode.replies:
        raise ValueError("the model has said nothing")
    return episode.replies[-1].text


def right_answer(episode: Episode, *, column: str | None) -> str:
    """The right last answer; what is not text in the task, as JSON. Raises ValueError where nobody knows it."""
    gold = episode.replies[-1].gold
    if column is None and gold is not None:
        return gold
    if column is None and "answer" not in episode.task:
        raise ValueError("the right answer is not known; name its column in options: {column: ...}")
    column = "answer" if column is None else column
    if column not in episode.task:
        raise ValueError(f"the task has no column {column}; it has {', '.join(map(str, episode.task))}")
    right = episode.task[column]
    return right if isinstance(right, str) else json.dumps(right, ensure_ascii=False)


def same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are the same; 1 is 1.0, and is not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
