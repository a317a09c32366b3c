"""What a model sees of a dialogue that has grown too long: the oldest exchanges are left out.

An exchange begins with what follows an answer. What is kept whatever happens, and the exchange that waits for an
answer, are not left out.
"""

from collections.abc import Collection, Sequence
from typing import Any

Message = dict[str, Any]


def kept_places(messages: Sequence[Message], keep: Collection[str]) -> list[int]:
    """Places of messages that are never left out: `system`, those that open the dialogue; `first_user`."""
    opening = 0
    while opening < len(messages) and messages[opening]["role"] == "system":
        opening += 1
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    return [
        *(range(opening) if "system" in keep else ()),
        *([first] if first is not None and "first_user" in keep else ()),
    ]


def exchanges(messages: Sequence[Message], kept: Collection[int]) -> list[list[int]]:
    """Places of messages that are not kept, by exchange."""
    found: list[list[int]] = []
    for place, message in enumerate(messages):
        if place in kept:
            continue
        answered = place > 0 and messages[place - 1]["role"] == "assistant"
        if not found or (answered and message["role"] != "assistant"):
            found.append([])
        found[-1].append(place)
    return found


def without_oldest(messages: Sequence[Message], count: int, keep: Collection[str]) -> list[Message]:
    """The messages without the oldest `count` exchanges; the last one stays in any case."""
    kept = kept_places(messages, keep)
    dropped = {place for places in exchanges(messages, kept)[:-1][:count] for place in places}
    return [message for place, message in enumerate(messages) if place not in dropped]


def droppable(messages: Sequence[Message], keep: Collection[str]) -> int:
    """Exchanges that can be left out."""
    return max(0, len(exchanges(messages, kept_places(messages, keep))) - 1)
