"""Conversion of the dialogue formats of datasets to one common form.

The common form is a mapping with `messages`, each with `role` and `content`, and `labels`: the correct answers to the
last message, or an empty list if unknown. Assistant messages also have `train` (whether they are in the loss) and, with
several correct answers, `labels` with all of them. Assistant messages before the first question are never in the loss.

Nothing is dropped silently: a row is unusable if a message has an unknown key, such as tool_calls or reasoning_content,
unless the caller lists the key in `ignored`. An invalid dialogue raises FormatError, which names the message by its
number from 1.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

ROLES = ("system", "user", "assistant", "tool")
SAME_ROLES = {
    "human": "user", "customer": "user",
    "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant", "agent": "assistant",
    "developer": "system",
    "function": "tool", "observation": "tool", "ipython": "tool", "function_response": "tool",
}  # fmt: skip
"""Role names of other formats, with the corresponding role."""
SPEAKERS = {"system": "assistant", "user1": "user", "user2": "assistant"}
"""Speaker names of task-oriented datasets, with the corresponding role. Their `system` is the one who answers."""

TOOL_COLUMNS = ("tools", "functions")
"""Columns with tool definitions for a chat template."""
PARLAI_FIELDS = ("text", "labels", "eval_labels", "episode_done", "id", "label_candidates", "reward")
"""Fields of ParlAI messages that are read, or that ParlAI agents never see."""

TRANSCRIPT_KEYS = ("agent", "tokens", "gold")
"""Extra message keys of simulation transcripts: the agent, its token ids, and the correct answer."""


class MessageKeys(NamedTuple):
    """Keys of a message in a format."""

    role: str
    content: str
    roles: Mapping[str, str]
    """Role names of the format, with the corresponding role."""


OPENAI = MessageKeys("role", "content", SAME_ROLES)
SHAREGPT = MessageKeys("from", "value", SAME_ROLES)
TURNS = MessageKeys("speaker", "text", SAME_ROLES | SPEAKERS)

ONE_FORM = ("messages", "labels", "train_all")
"""Keys of a row in the common form."""

Message = dict[str, Any]
Dialogue = dict[str, Any]


class FormatError(ValueError):
    """A dialogue that cannot be read. The text says what is wrong, and where."""


class UnreadKeysError(FormatError):
    """A dialogue with message keys or columns that are neither read nor ignored."""

    def __init__(self, message: str, keys: Sequence[str]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)
        """Keys or columns to ignore."""


def read_dialogue(
    row: Mapping[str, Any], *, column: str, form: str = "auto", ignored: Collection[str] = ()
) -> Dialogue:
    """Return the dialogue of a row in the common form.

    Args:
        row: The row, as a mapping from column to value.
        column: Column of the dialogue feature. Formats that use several columns ignore it, and a format's standard
            column is used if the row does not have it.
        form: Name of the format, or auto to detect it.
        ignored: Message keys and columns to ignore.

    Raises:
        FormatError: The row contains no valid dialogue.
    """
    cell = row.get(column)
    if is_read(cell):
        return dict(cell)
    if is_read(row):
        return {name: row[name] for name in ONE_FORM}
    if form == "auto":
        form, column = detect_format(row, column)
    elif form in LISTS and cell is None:
        column = next((name for name in LISTS[form] if row.get(name) is not None), column)
    for name in TOOL_COLUMNS:
        if name not in ignored and holds(row.get(name)):
            message = f"column {name} is not read; write the tools as text in a system message, or {way_out([name])}"
            raise UnreadKeysError(message, [name])
    return READERS[form](row, column, ignored)


def is_read(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a cell or row is a dialogue in the common form."""
    return isinstance(value, Mapping) and set(value) >= {*ONE_FORM}


def unread_keys(row: Mapping[str, Any], *, column: str) -> list[str]:
    """Return the message keys and columns that `ignore_keys` must list to read the dialogue of a row."""
    keys: list[str] = []
    while True:
        try:
            read_dialogue(row, column=column, ignored=keys)
        except UnreadKeysError as error:
            keys += error.keys
        except FormatError:
            return keys
        else:
            return keys


def detect_format(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    """Return the format, detected from the columns and the keys of the messages, and the column of the messages."""
    for name in (column, *(name for names in LISTS.values() for name in names)):
        items = plain_list(row.get(name))
        if items is None:
            continue
        first = items[0] if items else None
        if not isinstance(first, Mapping):
            raise FormatError(
                f"column {name} is {'an empty list' if not items else 'not a list of messages'}; "
                "write messages with role and content"
            )
        for form, keys in KEYS_BY_FORMAT.items():
            if any(set(keys) <= set(item) for item in items if isinstance(item, Mapping)):
                return form, name
        raise FormatError(
            f"column {name}: a message has the keys {', '.join(map(str, first))}; known are role and content, "
            "from and value, speaker and text, text and labels"
        )
    for form, (needed, _) in COLUMNS.items():
        if all(row.get(name) is not None for name in needed):
            return form, column
    raise FormatError(
        f"there is no dialogue: neither a list of messages in column {column} nor the columns of a known format; "
        f"there are {', '.join(map(str, row)) or 'no columns'}"
    )


def has_dialogues(columns: Sequence[str], *, column: str, form: str = "auto") -> bool:
    """Return whether rows with these columns can contain dialogues."""
    if column in columns or set(columns) >= {*ONE_FORM}:
        return True
    lists = [names for name, names in LISTS.items() if form in ("auto", name)]
    spread = [needed for name, (needed, _) in COLUMNS.items() if form in ("auto", name)]
    return any(name in columns for names in lists for name in names) or any(
        set(needed) <= set(columns) for needed in spread
    )


# The formats


def read_messages(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read OpenAI's chat format: a list of role and content. Content may be a list of text parts; weight is 0 or 1."""
    return dialogue_of(messages_of(items_of(row, column), OPENAI, ignored))


def read_sharegpt(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read ShareGPT: a list of from and value, with an optional system message in the column system."""
    messages = messages_of(items_of(row, column), SHAREGPT, ignored)
    system = row.get("system")
    return dialogue_of(([{"role": "system", "content": system}] if is_text(system) else []) + messages)


def read_turns(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read lists of speaker and text, as in task-oriented datasets, where the speaker system is the one who answers."""
    return dialogue_of(messages_of(items_of(row, column), TURNS, ignored))


def read_parlai(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read a ParlAI episode: a list of text and labels (or eval_labels), the correct answers."""
    messages: list[Message] = []
    for number, item in enumerate(items_of(row, column), start=1):
        where = f"message {number}"
        if not isinstance(item, Mapping):
            raise FormatError(f"{where} is not a mapping; write text and labels")
        refuse_unread(item, where, read={*PARLAI_FIELDS, *ignored}, content="text")
        text = item.get("text")
        if is_text(text):
            messages.append({"role": "user", "content": text})
        elif text not in (None, ""):
            raise FormatError(f"{where}: text is not text")
        written = item.get("labels") or item.get("eval_labels")
        labels = [written] if isinstance(written, str) else plain_list(written) or []
        if labels:
            messages.append(answer(labels, f"{where}: labels"))
    return dialogue_of(messages)


def read_alpaca(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read Alpaca: instruction, optional input, output, and optionally system and a history of pairs."""
    messages = []
    if is_text(row.get("system")):
        messages.append({"role": "system", "content": row["system"]})
    for number, pair in enumerate(plain_list(row.get("history")) or [], start=1):
        items = plain_list(pair)
        if items is None or len(items) != 2:
            raise FormatError(f"history: entry {number} is not a pair of question and answer")
        messages.append({"role": "user", "content": text_of(items[0], f"history: question {number}")})
        messages.append(answer([items[1]], f"history: answer {number}"))
    question = text_of(row.get("instruction"), "column instruction")
    if is_text(row.get("input")):
        question += "\n\n" + row["input"]
    messages.append({"role": "user", "content": question})
    return dialogue_of([*messages, *last_answer(row, "output")])


def read_prompt_completion(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read prompt and completion: texts or lists of messages. The completion may repeat the prompt."""
    return dialogue_of(joined(prompt_messages(row, ignored), answered(row, "completion", ignored), "completion"))


def read_chosen_rejected(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> Dialogue:
    """Read prompt, chosen and rejected: texts or lists of messages. Only chosen is in the loss; it may repeat the
    prompt."""
    prompt = prompt_messages(row, ignored) if row.get("prompt") is not None else []
    return dialogue_of(joined(prompt, answered(row, "chosen", ignored), "chosen"))


Read = Callable[[Mapping[str, Any], str, Collection[str]], Dialogue]
READERS: dict[str, Read] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "turns": read_turns,
    "parlai": read_parlai,
    "alpaca": read_alpaca,
    "chosen_rejected": read_chosen_rejected,
    "prompt_completion": read_prompt_completion,
}
LISTS = {
    "messages": ("messages",),
    "sharegpt": ("conversations", "conversation"),
    "turns": ("turns", "dialogue"),
    "parlai": ("episode",),
}
"""Standard columns with the list of messages, by format, for rows that lack the column of the feature."""
KEYS_BY_FORMAT = {
    "messages": ("role",),
    "sharegpt": ("from", "value"),
    "turns": ("speaker", "text"),
    "parlai": ("text",),
}
"""Message keys that identify a format, tried in this order."""
COLUMNS = {
    "chosen_rejected": (("chosen",), ("prompt", "rejected")),
    "alpaca": (("instruction",), ("input", "output")),
    "prompt_completion": (("prompt",), ("completion",)),
}
"""Required and optional columns of formats that use several columns, tried in this order."""


# Helpers


def dialogue_of(messages: Any) -> Dialogue:
    """Return messages in the common form. Assistant messages before the first question are not in the loss.

    Raises:
        FormatError: There is no message of a user or tool.
    """
    result: list[Message] = list(messages)
    has_question = False
    for message in result:
        has_question = has_question or message["role"] in ("user", "tool")
        if message["role"] == "assistant" and not has_question:
            message["train"] = False
    if not has_question:
        raise FormatError("there is no question: no message has the role user")
    return {"messages": result, "labels": []}


def items_of(row: Mapping[str, Any], column: str) -> list[Any]:
    items = plain_list(row.get(column))
    if items is None:
        raise FormatError(f"column {column} is not a list of messages")
    if not items:
        raise FormatError(f"column {column} is an empty list")
    return items


def messages_of(items: Sequence[object], keys: MessageKeys, ignored: Collection[str]) -> list[Message]:
    """Return the messages of a list. Raises FormatError for the first invalid one."""
    return [message_of(item, f"message {number}", keys, ignored) for number, item in enumerate(items, start=1)]


def message_of(item: object, where: str, keys: MessageKeys, ignored: Collection[str]) -> Message:
    """Return a message in its standard form.

    Args:
        item: The message as the row has it.
        where: Its position in the row, for errors.
        keys: Names of its keys and roles.
        ignored: Keys that may be there besides, and are not read.

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
    if name not in ROLES:
        raise FormatError(f"{where}: the {role} is {written!r}; write one of {', '.join(ROLES)}")
    read = {role, content, "weight", *(["labels"] if name == "assistant" else []), *TRANSCRIPT_KEYS, *ignored}
    refuse_unread(item, where, read=read, content=content)
    if name != "assistant":
        return {"role": name, "content": text_of(item.get(content), where, key=content)}
    labels = plain_list(item.get("labels")) or [item.get(content)]
    message = answer([text_of(label, where, key=content) for label in labels], where)
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise FormatError(f"{where}: weight is {weight!r}; write 0 or 1")
    return message | {"train": False} if weight == 0 else message


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
    return f"data.dialogue: {{ignore_keys: [{', '.join(keys)}]}} to leave that out of all rows"


def holds(value: object) -> bool:
    """Return whether a value is set: not None, NaN, or an empty string, list or mapping."""
    if value is None or (isinstance(value, float) and value != value):
        return False
    return not hasattr(value, "__len__") or len(value) > 0


def answer(labels: Sequence[Any], where: str) -> Message:
    """Return an assistant message with all its correct answers."""
    right = [text_of(label, where) for label in labels]
    message: Message = {"role": "assistant", "content": right[0], "train": True}
    return message | {"labels": right} if len(right) > 1 else message


def prompt_messages(row: Mapping[str, Any], ignored: Collection[str]) -> list[Message]:
    items = None if isinstance(row.get("prompt"), str) else plain_list(row.get("prompt"))
    if items is None:
        return [{"role": "user", "content": text_of(row.get("prompt"), "column prompt")}]
    return messages_of(items, OPENAI, ignored)


def joined(prompt: list[Message], rest: list[Message], column: str) -> list[Message]:
    """Return the whole dialogue, where `rest` is either the end of it or all of it. Raises FormatError if it is
    neither."""
    if not rest or rest[0]["role"] == "assistant" or all(message["role"] == "system" for message in prompt):
        return [*prompt, *rest]
    if said(rest[: len(prompt)]) == said(prompt):
        return rest
    raise FormatError(f"column {column} is a dialogue that does not begin with the prompt; write the answer alone")


def said(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def answered(row: Mapping[str, Any], column: str, ignored: Collection[str]) -> list[Message]:
    """Return the messages of a column: a list of messages, or one answer as text. A missing column gives an empty
    list."""
    items = None if isinstance(row.get(column), str) else plain_list(row.get(column))
    if items is None:
        return last_answer(row, column)
    try:
        return messages_of(items, OPENAI, ignored)
    except FormatError as error:
        raise FormatError(f"column {column}: {error}") from None


def last_answer(row: Mapping[str, Any], column: str) -> list[Message]:
    value = row.get(column)
    return [] if value is None or value == "" else [answer([value], f"column {column}")]


def plain_list(value: object) -> list[Any] | None:
    """Return a list, also from an array or a JSON string, or None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        import json

        try:
            value = json.loads(value)
        except ValueError:
            return None
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "tolist") and not isinstance(value, str):
        converted = value.tolist()
        return converted if isinstance(converted, list) else None
    return None


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def text_of(value: object, where: str, *, key: str = "content") -> str:
    """Return a text that is not blank; a list of text parts is concatenated. Raises FormatError."""
    parts = None if isinstance(value, str) else plain_list(value)
    if parts is not None:
        for part in parts:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                kind = part.get("type", "no mapping") if isinstance(part, Mapping) else type(part).__name__
                raise FormatError(f"{where}: a part of {key} is {kind}; only text parts are read")
        value = "".join(part["text"] for part in parts)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise FormatError(f"{where}: {key} is {'missing' if value is None else 'not text'}")
    if not value.strip():
        raise FormatError(f"{where}: {key} is empty")
    return value
