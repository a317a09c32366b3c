"""Messages of datasets in the common form."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from partita_schema.cells import is_missing
from partita_schema.dialogues.common_form import ANSWER, ROLES, FormatError, Message, UnreadKeysError
from partita_schema.dialogues.tools import tool_calls_of
from partita_schema.dialogues.values import holds, is_text, parsed_json, plain_list, text_of

CALLS = "tool_calls"
"""Role of a message whose content is tool calls as JSON, which the assistant makes."""
SAME_ROLES = {
    "human": "user", "customer": "user",
    "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant", "agent": "assistant",
    "developer": "system",
    "function": "tool", "observation": "tool", "ipython": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": CALLS, "tool_call": CALLS,
}  # fmt: skip
"""Role names of other formats, with the corresponding role."""
SPEAKERS = {"system": "assistant", "user1": "user", "user2": "assistant"}
"""Speaker names of task-oriented datasets, with the corresponding role. Their `system` is the one who answers."""

POSITION_KEYS = ("turn_id", "index")
"""Keys of task-oriented datasets with the position of a message in its dialogue."""
TRANSCRIPT_KEYS = ("agent", "tokens", "gold", "other_golds")
"""Extra message keys of simulation transcripts: the agent, its token ids, and the correct answers."""
CALL_KEYS = ("tool_calls", "function_call")
"""Keys of an assistant message with its tool calls."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant message with its reasoning."""
TOOL_RESULT_KEYS = ("name", "tool_call_id")
"""Keys of a tool message that say which call it answers."""


READ_KEYS = (
    "role",
    "weight",
    "labels",
    "train",
    "outputs",
    "values",
    ANSWER,
    *TRANSCRIPT_KEYS,
    *CALL_KEYS,
    *REASONING_KEYS,
)
"""Message keys with a meaning in every format, which no output can be read from."""


class KnownKeys(NamedTuple):
    """Message keys and columns that are not part of a format."""

    ignored: Collection[str] = ()
    """Keys and columns to ignore."""
    outputs: Collection[str] = ()
    """Message keys that hold outputs."""
    allows_blank: bool = False
    """Whether the content of a message of a user or the assistant may be empty, as happens in chats with a server."""

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """Message keys with outputs, or with the whole answer of a simulation."""
        return (*self.outputs, ANSWER) if self.outputs else ()

    def of_message(self, item: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys that a message may have besides those of its format."""
        of_transcript = ("values",) if self.outputs and ANSWER in item else ()
        return (*self.ignored, *self.answer_keys, *of_transcript)


class MessageKeys(NamedTuple):
    """Keys of a message in a format."""

    role: str
    content: str
    roles: Mapping[str, str]
    """Role names of the format, with the corresponding role."""


OPENAI = MessageKeys("role", "content", SAME_ROLES)
SHAREGPT = MessageKeys("from", "value", SAME_ROLES)
TURNS = MessageKeys("speaker", "text", SAME_ROLES | SPEAKERS)
UTTERANCES = TURNS._replace(content="utterance")


def messages_of(items: Sequence[object], keys: MessageKeys, known: KnownKeys) -> list[Message]:
    """Return the messages of a list. Raises FormatError for the first invalid one."""
    return [message_of(item, f"message {number}", keys, known) for number, item in enumerate(items, start=1)]


def message_of(item: object, where: str, keys: MessageKeys, known: KnownKeys) -> Message:
    """Return a message in the common form.

    Args:
        item: The message as the row has it.
        where: Its position in the row, for errors.
        keys: Names of its keys and roles.
        known: Further keys that a message may have.

    Raises:
        FormatError: The message is invalid.
    """
    role, content, roles = keys
    if not isinstance(item, Mapping):
        raise FormatError(f"{where} is not a mapping; write {role} and {content}")
    written = item.get(role)
    if not isinstance(written, str):
        raise FormatError(f"{where} has no {role}; write one of {', '.join(ROLES)}")
    name = roles.get(written.lower(), written.lower())
    if name not in (*ROLES, CALLS):
        raise FormatError(f"{where}: the {role} is {written!r}; write one of {', '.join(ROLES)}")
    by_assistant = name in ("assistant", CALLS)
    own = ("labels", *CALL_KEYS, *REASONING_KEYS) if by_assistant else TOOL_RESULT_KEYS if name == "tool" else ()
    read = {role, content, "weight", *own, *TRANSCRIPT_KEYS, *known.of_message(item)}
    refuse_unread(item, where, read=read, content=content)
    shown = {key: value for key, value in item.items() if key not in known.ignored or key in (role, content)}
    outputs = with_outputs(item, known.answer_keys)
    if by_assistant:
        needs_text = not known.outputs and not known.allows_blank
        message = assistant_message(shown, where, content=content, only_calls=name == CALLS, needs_text=needs_text)
    elif name == "tool":
        message = tool_message(shown, where, content=content)
    elif known.allows_blank and item.get(content) == "":
        message = {"role": name, "content": ""}
    else:
        message = {"role": name, "content": text_of(item.get(content), where, key=content)}
    return message | outputs


def with_outputs(item: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the entry of a message for its outputs by key, if it has any."""
    values = {key: item[key] for key in keys if key in item and not is_missing(item[key])}
    return {"outputs": values} if values else {}


def assistant_message(
    item: Mapping[str, Any], where: str, *, content: str, only_calls: bool, needs_text: bool
) -> Message:
    """Return a message of the assistant.

    Args:
        item: The message, without ignored keys.
        where: Its position in the row, for errors.
        content: Key of its text.
        only_calls: Whether its text is tool calls as JSON.
        needs_text: Whether it must have a text or tool calls; if not, it may have only outputs.
    """
    called = [item.get(content)] if only_calls else [item[key] for key in CALL_KEYS if holds(item.get(key))]
    calls = [call for value in called for call in tool_calls_of(value, where)]
    reasoning = reasoning_of(item, where)
    written = None if only_calls else item.get(content)
    labels = plain_list(item.get("labels")) or [written]
    if holds(written) and written not in labels:
        raise FormatError(f"{where}: {content} is none of the labels; write it in labels too, or leave it out")
    if (calls or not needs_text) and not holds(written) and not holds(labels[0]):
        message: Message = {"role": "assistant", "content": "", "train": True}
    else:
        message = answer([text_of(label, where, key=content) for label in labels], where)
    if len(labels) > 1 and (calls or reasoning):
        raise FormatError(f"{where} has several labels with tool calls or reasoning; write one answer")
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise FormatError(f"{where}: weight is {weight!r}; write 0 or 1")
    return message | {"train": False} if weight == 0 else message


def tool_message(item: Mapping[str, Any], where: str, *, content: str) -> Message:
    """Return the result of a tool: text, which may be empty, or an object, which is written as JSON."""
    value = item.get(content)
    if isinstance(value, Mapping):
        value = json.dumps(parsed_json(dict(value), f"{where}: {content}"), ensure_ascii=False, default=str)
    message: Message = {"role": "tool", "content": "" if value == "" else text_of(value, where, key=content)}
    for key in TOOL_RESULT_KEYS:
        if holds(item.get(key)):
            if not isinstance(item[key], str):
                raise FormatError(f"{where}: {key} is not text")
            message[key] = item[key]
    return message


def reasoning_of(item: Mapping[str, Any], where: str) -> str:
    """Return the reasoning of an assistant message; empty if it has none. Raise FormatError if keys disagree."""
    texts = [
        text_of(item[key], where, key=key) for key in REASONING_KEYS if is_text(item.get(key)) or is_odd(item, key)
    ]
    if len(set(texts)) > 1:
        raise FormatError(f"{where} has several texts of reasoning; write reasoning_content alone")
    return texts[0] if texts else ""


def is_odd(item: Mapping[str, Any], key: str) -> bool:
    return holds(item.get(key)) and not isinstance(item[key], str)


def refuse_unread(item: Mapping[str, Any], where: str, *, read: Collection[str], content: str) -> None:
    """Raise FormatError if a message has a value under a key that is not read.

    Args:
        item: The message.
        where: Name of the message for the error text.
        read: Keys that are read or ignored.
        content: Key of the message text, for the error text.
    """
    unread = [str(key) for key in item if key not in read and holds(item[key])]
    if unread:
        raise UnreadKeysError(
            f"{where} has {', '.join(unread)}, which {'is' if len(unread) == 1 else 'are'} not read; write what the "
            f"model is to see as text in {content}, or {way_out(unread)}",
            unread,
        )


def way_out(keys: Sequence[str]) -> str:
    """Return how to ignore keys, for the error text."""
    return f"data.dialogue: {{ignore_keys: [{', '.join(keys)}]}} to leave that out of all rows"


def answer(labels: Sequence[Any], where: str) -> Message:
    """Return an assistant message with all its correct answers."""
    right = [text_of(label, where) for label in labels]
    message: Message = {"role": "assistant", "content": right[0], "train": True}
    return message | {"labels": right} if len(right) > 1 else message
