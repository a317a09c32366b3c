"""The dialogue formats of datasets: how each is read and recognized."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partita_schema.dialogues.common_form import ANSWER_KEYS, Dialogue, FormatError, Message
from partita_schema.dialogues.messages import (
    OPENAI,
    POSITION_KEYS,
    SHAREGPT,
    TURNS,
    UTTERANCES,
    KnownKeys,
    answer,
    messages_of,
    refuse_unread,
    with_outputs,
)
from partita_schema.dialogues.values import is_text, plain_list, text_of
from partita_schema.errors import shortened

PARLAI_FIELDS = ("text", "labels", "eval_labels", "episode_done", "id", "label_candidates", "reward")
"""Fields of ParlAI messages that are read, or that ParlAI agents never see."""

# The formats


def read_messages(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read OpenAI's chat format: a list of role and content. Content may be a list of text parts; weight is 0 or 1."""
    return dialogue_of(messages_of(items_of(row, column), OPENAI, known))


def read_sharegpt(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read ShareGPT: a list of from and value."""
    return dialogue_of(messages_of(items_of(row, column), SHAREGPT, known))


def read_turns(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read lists of speaker and text or utterance, as in task-oriented datasets (SGD, MultiWOZ, Taskmaster), where the
    speaker system is the one who answers."""
    items = items_of(row, column)
    has_text = any(isinstance(item, Mapping) and "text" in item for item in items)
    known = known._replace(ignored=(*known.ignored, *POSITION_KEYS))
    return dialogue_of(messages_of(items, TURNS if has_text else UTTERANCES, known))


def read_chatml(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read a text in ChatML: `<|im_start|>role`, a line break, the content and `<|im_end|>` for each message."""
    text = row.get(column)
    if not isinstance(text, str):
        raise FormatError(f"column {column} is not text in ChatML")
    return dialogue_of(messages_of(chatml_items(text), OPENAI, known))


def read_segments(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read a text in segments: a list of text and label, which says whether the segment is in the loss.

    Segments become messages of the assistant and of the user, which nothing is added to. Segments with the same label
    that follow each other are one.
    """
    messages: list[Message] = []
    for number, item in enumerate(items_of(row, column), start=1):
        where = f"segment {number}"
        if not isinstance(item, Mapping):
            raise FormatError(f"{where} is not a mapping; write label and text")
        refuse_unread(item, where, read={"label", "text", *known.ignored}, content="text")
        text, label = item.get("text"), item.get("label")
        if not isinstance(text, str):
            raise FormatError(f"{where}: text is {'missing' if text is None else 'not text'}")
        if label not in (True, False):
            raise FormatError(f"{where}: label is {label!r}; write true if the segment is in the loss, else false")
        if messages and messages[-1].get("train", False) == bool(label):
            messages[-1]["content"] += text
        else:
            message = (
                {"role": "assistant", "content": text, "train": True} if label else {"role": "user", "content": text}
            )
            messages.append(message)
    messages = [message for message in messages if message["content"]]
    if not messages:
        raise FormatError(f"column {column} has no text")
    return {"messages": messages, "labels": [], "verbatim": True}


def read_episode(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read a ParlAI episode: a list of text and labels (or eval_labels), the correct answers."""
    messages: list[Message] = []
    for number, item in enumerate(items_of(row, column), start=1):
        where = f"message {number}"
        if not isinstance(item, Mapping):
            raise FormatError(f"{where} is not a mapping; write text and labels")
        refuse_unread(item, where, read={*PARLAI_FIELDS, *known.of_message(item)}, content="text")
        text, outputs = item.get("text"), with_outputs(item, known.answer_keys)
        if is_text(text):
            messages.append({"role": "user", "content": text, **outputs})
        elif text not in (None, ""):
            raise FormatError(f"{where}: text is not text")
        written = item.get("labels") or item.get("eval_labels")
        labels = [written] if isinstance(written, str) else plain_list(written) or []
        if labels:
            messages.append(answer(labels, f"{where}: labels") | outputs)
        elif outputs:
            messages.append({"role": "assistant", "content": "", "train": True, **outputs})
    return dialogue_of(messages)


def read_alpaca(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read Alpaca: instruction, optional input, output, and optionally a history of pairs."""
    messages = []
    for number, pair in enumerate(plain_list(row.get("history")) or [], start=1):
        items = plain_list(pair)
        if items is None or len(items) != 2:
            raise FormatError(f"history: entry {number} is not a pair of question and answer")
        messages.append({"role": "user", "content": text_of(items[0], f"history: question {number}")})
        messages.append(answer([items[1]], f"history: answer {number}"))
    question = text_of(row.get("instruction"), "column instruction")
    if is_text(row.get("input")):
        question += "\n" + row["input"]
    messages.append({"role": "user", "content": question})
    return dialogue_of([*messages, *last_answer(row, "output", known)])


def read_prompt_completion(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read prompt and completion: texts or lists of messages. The completion may repeat the prompt."""
    return dialogue_of(joined(prompt_messages(row, known), answered(row, "completion", known), "completion"))


def read_chosen_rejected(row: Mapping[str, Any], column: str, known: KnownKeys) -> Dialogue:
    """Read prompt, chosen and rejected: texts or lists of messages. Only chosen is in the loss; it may repeat the
    prompt."""
    prompt = prompt_messages(row, known) if row.get("prompt") is not None else []
    return dialogue_of(joined(prompt, answered(row, "chosen", known), "chosen"))


Read = Callable[[Mapping[str, Any], str, KnownKeys], Dialogue]
READERS: dict[str, Read] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "turns": read_turns,
    "chatml": read_chatml,
    "segments": read_segments,
    "parlai": read_episode,
    "alpaca": read_alpaca,
    "chosen_rejected": read_chosen_rejected,
    "prompt_completion": read_prompt_completion,
}
LISTS = {
    "messages": ("messages",),
    "sharegpt": ("conversations", "conversation"),
    "turns": ("turns", "dialogue", "utterances"),
    "segments": ("segments",),
    "parlai": ("episode",),
}
"""Standard columns with the list of messages, by format, for rows that lack the column of the feature."""
KEYS_BY_FORMAT = {
    "messages": (("role",),),
    "sharegpt": (("from", "value"),),
    "turns": (("speaker", "text"), ("speaker", "utterance")),
    "segments": (("label", "text"),),
    "parlai": (("text",),),
}
"""Message keys that identify a format, with alternatives, tried in this order."""
COLUMNS = {
    "chosen_rejected": (("chosen",), ("prompt", "rejected")),
    "alpaca": (("instruction",), ("input", "output")),
    "prompt_completion": (("prompt",), ("completion",)),
}
"""Required and optional columns of formats that use several columns, tried in this order."""
OTHER_COLUMNS = ("system", "history")
"""Further columns: every format reads a system message, and Alpaca a history."""
TOOL_COLUMNS = ("tools", "functions")
"""Columns with tool definitions for a chat template."""
STANDARD_COLUMNS = tuple(
    dict.fromkeys(
        (
            *(name for names in LISTS.values() for name in names),
            *(name for needed, optional in COLUMNS.values() for name in (*needed, *optional)),
            *OTHER_COLUMNS,
            *TOOL_COLUMNS,
        )
    )
)
"""All columns that formats read."""
CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"


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


def chatml_items(text: str) -> list[dict[str, str]]:
    """Return the messages of a text in ChatML. The start of an answer at its end, without content, is left out.

    Raises:
        FormatError: There is text outside of the messages.
    """
    before, *turns = text.split(CHATML_START)
    items = []
    for number, turn in enumerate(turns, start=1):
        role, _, rest = turn.partition("\n")
        content, end, after = rest.partition(CHATML_END)
        if after.strip():
            raise FormatError(f"message {number}: there is text after {CHATML_END}: {shortened(after.strip())!r}")
        if number < len(turns) and not end:
            raise FormatError(f"message {number} does not end with {CHATML_END}")
        if end or content.strip():
            items.append({"role": role.strip(), "content": content})
    if before.strip() or not items:
        found = f"begins with {shortened(before.strip())!r}" if before.strip() else "has no message"
        raise FormatError(f"the text {found}; ChatML begins with {CHATML_START} and a role")
    return items


def items_of(row: Mapping[str, Any], column: str) -> list[Any]:
    items = plain_list(row.get(column))
    if items is None:
        raise FormatError(f"column {column} is not a list of messages")
    if not items:
        raise FormatError(f"column {column} is an empty list")
    return items


def prompt_messages(row: Mapping[str, Any], known: KnownKeys) -> list[Message]:
    items = None if isinstance(row.get("prompt"), str) else plain_list(row.get("prompt"))
    if items is None:
        return [{"role": "user", "content": text_of(row.get("prompt"), "column prompt")}]
    return messages_of(items, OPENAI, known)


def joined(prompt: list[Message], rest: list[Message], column: str) -> list[Message]:
    """Return the whole dialogue, where `rest` is either the end of it or all of it, perhaps after a system message.
    Raises FormatError if it is neither."""
    if not rest or rest[0]["role"] == "assistant" or all(message["role"] == "system" for message in prompt):
        return [*prompt, *rest]
    start = int(rest[0]["role"] == "system" != prompt[0]["role"])
    if said(rest[start : start + len(prompt)]) == said(prompt):
        return rest
    raise FormatError(f"column {column} is a dialogue that does not begin with the prompt; write the answer alone")


def said(messages: Sequence[Message]) -> list[Message]:
    return [{key: message.get(key) for key in ("role", *ANSWER_KEYS)} for message in messages]


def answered(row: Mapping[str, Any], column: str, known: KnownKeys) -> list[Message]:
    """Return the messages of a column: a list of messages, or one answer as text. A missing column gives an empty
    list, unless the row has outputs."""
    items = None if isinstance(row.get(column), str) else plain_list(row.get(column))
    if items is None:
        return last_answer(row, column, known)
    try:
        return messages_of(items, OPENAI, known)
    except FormatError as error:
        raise FormatError(f"column {column}: {error}") from None


def last_answer(row: Mapping[str, Any], column: str, known: KnownKeys) -> list[Message]:
    """Return the answer of a row without a list of messages; its outputs are columns of the row."""
    value, outputs = row.get(column), with_outputs(row, known.outputs)
    if value is None or value == "":
        return [{"role": "assistant", "content": "", "train": True, **outputs}] if outputs else []
    return [answer([value], f"column {column}") | outputs]
