"""Dialogues cut into pieces of history and an answer, as ParlAI squashes episodes. Pure functions.

A piece is one message; the golden tables are those of ParlAI's flattened episodes, where `context_length` counts
pieces, questions and answers each, with the question that is answered among them. Messages of the role system that open
a dialogue are shown in every row and count as nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]


class HistoryLimits(NamedTuple):
    """How much of what was said before is shown."""

    include_labels: bool = True
    """Whether earlier answers are shown."""
    context_length: int | None = None
    """Pieces, the last question included."""
    context_turns: int | None = None
    """Exchanges of question and answer, the last question's included."""
    context_tokens: int | None = None
    """Tokens of the pieces; the last question is always shown."""


ALL = HistoryLimits()


def answers(messages: Sequence[Message]) -> list[int]:
    """Places of the answers that are learned: messages of the assistant behind a question."""
    return [place for place, message in enumerate(messages) if message.get("learned")]


def history(
    messages: Sequence[Message], place: int, *, context: HistoryLimits = ALL, count: Callable[[str], int] | None = None
) -> list[Message]:
    """What is shown before the message at `place`. `count` counts the tokens of a text, where context_tokens is set."""
    opening = 0
    while opening < place and messages[opening]["role"] == "system":
        opening += 1
    said = list(messages[opening:place])
    if context.context_turns is not None:
        said = said[turn_start(said, context.context_turns) :]
    if not context.include_labels:
        said = [message for message in said if message["role"] != "assistant"]
    if context.context_length is not None:
        said = said[max(0, len(said) - context.context_length) :]
    if context.context_tokens is not None:
        assert count is not None
        said = said[token_start(said, context.context_tokens, count) :]
    return [*messages[:opening], *said]


def turn_start(said: Sequence[Message], turns: int) -> int:
    """Where the last `turns` exchanges begin: an exchange begins with what follows an answer."""
    starts = [
        place
        for place, message in enumerate(said)
        if message["role"] != "assistant" and (place == 0 or said[place - 1]["role"] == "assistant")
    ]
    return starts[-turns] if len(starts) >= turns else 0


def token_start(said: Sequence[Message], limit: int, count: Callable[[str], int]) -> int:
    """Where the last pieces begin that have `limit` tokens together; at least the last piece is kept."""
    total, start = 0, len(said)
    for place in range(len(said) - 1, -1, -1):
        total += count(said[place]["content"])
        if total > limit and start < len(said):
            break
        start = place
        if total > limit:
            break
    return start
