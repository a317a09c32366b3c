"""Split dialogues into history and answer, as ParlAI flattens episodes. Pure functions.

`context_length` counts messages, as in ParlAI's flattened episodes: questions and answers count one each, including the
question that is answered. System messages at the start of a dialogue are shown in every row and do not count.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]


class HistoryLimits(NamedTuple):
    """How much of the previous conversation is shown."""

    include_labels: bool = True
    """Whether earlier answers are shown."""
    context_length: int | None = None
    """Maximum number of messages, including the last question."""
    context_turns: int | None = None
    """Maximum number of exchanges of question and answer, including the last question's."""
    context_tokens: int | None = None
    """Maximum number of tokens of the messages; the last question is always shown."""


ALL = HistoryLimits()


def answers(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the answers that are learned: messages of the assistant after a question."""
    return [place for place, message in enumerate(messages) if message.get("learned")]


def history(
    messages: Sequence[Message], place: int, *, context: HistoryLimits = ALL, count: Callable[[str], int] | None = None
) -> list[Message]:
    """Return the messages that are shown before the one at `place`.

    Args:
        messages: The whole dialogue.
        place: Index of the answer.
        context: Limits of the history.
        count: Returns the number of tokens of a text; required if context_tokens is set.
    """
    opening = 0
    while opening < place and messages[opening]["role"] == "system":
        opening += 1
    shown = list(messages[opening:place])
    if context.context_turns is not None:
        shown = shown[turn_start(shown, context.context_turns) :]
    if not context.include_labels:
        shown = [message for message in shown if message["role"] != "assistant"]
    if context.context_length is not None:
        shown = shown[max(0, len(shown) - context.context_length) :]
    if context.context_tokens is not None:
        assert count is not None
        shown = shown[token_start(shown, context.context_tokens, count) :]
    return [*messages[:opening], *shown]


def turn_start(said: Sequence[Message], turns: int) -> int:
    """Return the start of the last `turns` exchanges; an exchange starts after an answer."""
    starts = [
        place
        for place, message in enumerate(said)
        if message["role"] != "assistant" and (place == 0 or said[place - 1]["role"] == "assistant")
    ]
    return starts[-turns] if len(starts) >= turns else 0


def token_start(said: Sequence[Message], limit: int, count: Callable[[str], int]) -> int:
    """Return the start of the longest suffix of at most `limit` tokens; at least the last message is kept."""
    total, start = 0, len(said)
    for place in range(len(said) - 1, -1, -1):
        total += count(said[place]["content"])
        if total > limit and start < len(said):
            break
        start = place
        if total > limit:
            break
    return start
