"""Built-in checkers of the last answer: exact match, substring, regular expression, JSON equality.

The right answer is the named column of the task if there is one, else the gold answer of the world for the last turn,
else the column `answer` of the task. It is also the target of the verdict.
"""

import json
import re
from typing import Any

from partita.data.episode import Episode, same_values
from partita.simulation.contract import Verdict
from partita_schema.common.json_text import parse_json
from partita_schema.errors import shortened


class Exact:
    """Checks that the last answer equals the right one, ignoring leading and trailing white space."""

    def __init__(self, *, column: str | None = None, ignore_case: bool = False, feedback: str = "") -> None:
        """`column` of the task holds the right answer. `feedback` is the message to the model after a wrong answer."""
        self.column, self.ignore_case, self.feedback = column, ignore_case, feedback

    def check(self, episode: Episode) -> Verdict:
        """Check the last answer. Raises ValueError if the right answer is unknown."""
        answer, target = last_answer(episode, column=self.column), expected_answer(episode, column=self.column)
        others = other_answers(episode, column=self.column)
        fits = any(self.fits(self.normalize(answer), self.normalize(right)) for right in (target, *others))
        return Verdict(fits, feedback=self.feedback, target=target)

    def normalize(self, text: str) -> str:
        """Normalize a text for the comparison."""
        return text.strip().casefold() if self.ignore_case else text.strip()

    def fits(self, answer: str, right: str) -> bool:
        """Return whether the normalized texts are equal."""
        return answer == right


class Contains(Exact):
    """Checks that the last answer contains the right one, which is not empty."""

    def fits(self, answer: str, right: str) -> bool:
        """Return whether `answer` contains `right`. Raises ValueError for an empty one, which all answers contain."""
        if not right:
            raise ValueError("the right answer is empty, and every answer contains it; write one, or type: exact")
        return right in answer


class Regex:
    """Checks that a pattern is found in the last answer."""

    def __init__(self, *, pattern: str, feedback: str = "") -> None:
        """`pattern` is a regular expression, searched anywhere in the answer. Raises re.error if it is invalid."""
        self.pattern, self.feedback = re.compile(pattern), feedback

    def check(self, episode: Episode) -> Verdict:
        """Check the last answer. The verdict has no target, since no right answer is needed."""
        return Verdict(self.pattern.search(last_answer(episode)) is not None, feedback=self.feedback)


class JsonEqual:
    """Checks that the last answer is JSON equal to the right one, ignoring the order of keys and white space."""

    def __init__(self, *, column: str | None = None, feedback: str = "") -> None:
        """`column` of the task holds the right answer, as a JSON value or as its text."""
        self.column, self.feedback = column, feedback

    def check(self, episode: Episode) -> Verdict:
        """Check the last answer. Raises ValueError if the right answer is unknown or not JSON."""
        answer = last_answer(episode, column=self.column)
        target = expected_answer(episode, column=self.column, as_json=True)
        others = other_answers(episode, column=self.column)
        wanted = [parse_right_answer(right) for right in (target, *others)]
        try:
            value, is_json = parse_json(answer), True
        except ValueError:
            value, is_json = None, False
        fits = is_json and any(same_values(value, right) for right in wanted)
        return Verdict(fits, feedback=self.feedback, target=target, metrics={"is_json": float(is_json)})


def parse_right_answer(text: str) -> Any:
    """Return the value of a right answer. Raises ValueError if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        raise ValueError(f"the right answer {shortened(text)} is not JSON") from None


def other_answers(episode: Episode, *, column: str | None) -> tuple[str, ...]:
    """Return further right last answers, if the world knows any and no column of the task holds the right one."""
    return episode.replies[-1].other_golds if column is None else ()


def last_answer(episode: Episode, *, column: str | None = None) -> str:
    """Return the last answer of the model: as a whole to compare it with the gold answer, else as others receive it.

    Raises:
        ValueError: The model has not answered.
    """
    if not episode.replies:
        raise ValueError("the model has not answered")
    last = episode.replies[-1]
    return last.whole if column is None and last.gold is not None else last.text


def expected_answer(episode: Episode, *, column: str | None, as_json: bool = False) -> str:
    """Return the right last answer, as JSON if it is not text. Raises ValueError if it is unknown.

    Args:
        episode: The episode.
        column: Column of the task with the right answer; None for the gold answer of the world.
        as_json: Whether null is an answer.
    """
    gold = episode.replies[-1].gold
    if column is None and gold is not None:
        return gold
    if column is None and "answer" not in episode.task:
        raise ValueError("the right answer is not known; name its column in options: {column: ...}")
    column = "answer" if column is None else column
    if column not in episode.task:
        raise ValueError(f"the task has no column {column}; it has {', '.join(map(str, episode.task))}")
    right = episode.task[column]
    if right is None and not as_json:
        raise ValueError(f"the right answer is not known: the task's {column} is empty")
    return right if isinstance(right, str) else json.dumps(right, ensure_ascii=False)
