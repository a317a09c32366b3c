"""The common form of dialogues, and its errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Message = dict[str, Any]
Dialogue = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")

COMMON_FORM_KEYS = ("messages", "labels", "train_all")
"""Keys of a row in the common form."""
OPTIONAL_KEYS = ("tools", "answer", "verbatim", "output", "rejected")
"""Further keys that a row in the common form may have."""
CONTENT = "content"
"""Key of a message's text, and the column of an output that is this text."""
ANSWER = "generated"
"""Message key of simulation transcripts: the whole answer of a turn with several outputs, as the model wrote it."""
ANSWER_KEYS = ("content", "tool_calls", "reasoning_content")
"""Keys of an assistant message that a chat template writes."""


class FormatError(ValueError):
    """A dialogue that cannot be read. The text says what is wrong, and where."""


class UnreadKeysError(FormatError):
    """A dialogue with message keys or columns that are neither read nor ignored."""

    def __init__(self, message: str, keys: Sequence[str]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)
        """Keys or columns to ignore."""


def is_common_form(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a cell or row is a dialogue in the common form."""
    return isinstance(value, Mapping) and set(value) >= {*COMMON_FORM_KEYS}


def is_structured(message: Mapping[str, Any]) -> bool:
    """Return whether a message has more than text: tool calls or reasoning."""
    return bool(message.get("tool_calls") or message.get("reasoning_content"))


def answer_to_learn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a row needs besides `labels` to learn this answer."""
    if not is_structured(message):
        return {}
    return {"answer": {key: message[key] for key in ANSWER_KEYS if key in message}}


def message_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message with its tool calls as JSON, one per line."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(text for text in (message["content"], *calls) if text)
