"""Shorten dialogues that are too long for the context: drop the oldest exchanges.

An exchange starts with the first message after an answer. Protected messages (`keep`) and the last exchange, which
waits for an answer, are never dropped.
"""

from collections.abc import Collection, Sequence
from typing import Any

Message = dict[str, Any]


def protected_indices(messages: Sequence[Message], keep: Collection[str]) -> list[int]:
    """Return the indices of messages that are never dropped.

    `keep` may contain `system`, the system messages at the start, and `first_user`, the first message of the user.
    """
    opening = 0
    while opening < len(messages) and messages[opening]["role"] == "system":
        opening += 1
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    return [
        *(range(opening) if "system" in keep else ()),
        *([first] if first is not None and "first_user" in keep else ()),
    ]


def exchanges(messages: Sequence[Message], protected: Collection[int]) -> list[list[int]]:
    """Group the indices of the messages that are not protected by exchange."""
    groups: list[list[int]] = []
    for index, message in enumerate(messages):
        if index in protected:
            continue
        answered = index > 0 and messages[index - 1]["role"] == "assistant"
        # Several messages can precede an answer, for example of a tool: only the first of them starts an exchange.
        if not groups or (answered and message["role"] != "assistant"):
            groups.append([])
        groups[-1].append(index)
    return groups


def without_oldest(messages: Sequence[Message], count: int, keep: Collection[str]) -> list[Message]:
    """Return the messages without the oldest `count` exchanges; the last exchange always stays."""
    protected = protected_indices(messages, keep)
    dropped = {index for group in exchanges(messages, protected)[:-1][:count] for index in group}
    return [message for index, message in enumerate(messages) if index not in dropped]


def droppable(messages: Sequence[Message], keep: Collection[str]) -> int:
    """Return the number of exchanges that can be dropped."""
    return max(0, len(exchanges(messages, protected_indices(messages, keep))) - 1)
