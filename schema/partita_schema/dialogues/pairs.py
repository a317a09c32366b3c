"""Read pairs of a chosen and a rejected answer to the same dialogue, in the layouts of preference datasets.

Each answer is a text, a message, a list of messages that ends the dialogue, or the whole dialogue. The prompt is in a
column of any dialogue format, or it is the common beginning of both dialogues. Only their last messages may differ.
"""

from collections.abc import Mapping
from typing import Any

from partita_schema.dialogues.common_form import (
    ANSWER_KEYS,
    Dialogue,
    FormatError,
    Message,
    answer_to_learn,
    message_text,
)
from partita_schema.dialogues.formats import COLUMNS, LISTS, READERS, dialogue_of, joined, said
from partita_schema.dialogues.messages import OPENAI, SHAREGPT, KnownKeys, answer, messages_of
from partita_schema.dialogues.read import (
    detect_format,
    read_dialogue,
    refuse_media,
    with_system,
    with_tools,
    without_ignored,
)
from partita_schema.dialogues.values import holds, plain_list

PROMPTS = ("prompt", "instruction")
"""Columns with a prompt outside of a list of messages."""


def read_pair(
    row: Mapping[str, Any], *, column: str, format_name: str, known: KnownKeys, chosen: str, rejected: str
) -> Dialogue:
    """Return the dialogue up to the answers in the common form, with `labels` and `answer` of the chosen one.

    The rejected answer is under `rejected`, as a message.

    Args:
        row: The row, with the names that formats have for its columns.
        column: Column of the dialogue feature.
        format_name: Name of the format of the prompt, or auto to detect it.
        known: Further message keys and columns to ignore.
        chosen: Column of the better answer.
        rejected: Column of the worse answer.

    Raises:
        FormatError: The row contains no valid pair.
    """
    row = without_ignored(row, known.ignored)
    refuse_media(row, known.ignored)
    for name in (chosen, rejected):
        if not holds(row.get(name)):
            raise FormatError(f"column {name} is missing or empty")
    rest = {name: value for name, value in row.items() if name not in (chosen, rejected)}
    prompt = prompt_of(rest, column, format_name=format_name, known=known)
    better, worse = (with_system(whole_dialogue(prompt, row[name], name, known), row) for name in (chosen, rejected))
    messages = shared_messages(better, worse, chosen=chosen, rejected=rejected)
    dialogue = dialogue_of([*messages, better[-1]]) | {"messages": messages, "train_all": False}
    right = {"labels": [message_text(better[-1])], **answer_to_learn(better[-1])}
    return with_tools(dialogue, row, known.ignored) | right | {"rejected": answer_message(worse[-1])}


def read_answer(row: Mapping[str, Any], *, column: str, format_name: str, known: KnownKeys, answer: str) -> Dialogue:
    """Return the dialogue up to a single answer in the common form, with the answer.

    Args:
        row: The row, with the names that formats have for its columns.
        column: Column of the dialogue feature.
        format_name: Name of the format of the dialogue, or auto to detect it.
        known: Further message keys and columns to ignore.
        answer: Column of the answer; if it is empty, the answer is the last message of the dialogue.

    Raises:
        FormatError: The row contains no valid dialogue with an answer.
    """
    row = without_ignored(row, known.ignored)
    refuse_media(row, known.ignored)
    rest = {name: value for name, value in row.items() if name != answer or not holds(value)}
    if answer in rest or answer not in row:
        dialogue = read_dialogue(rest, column=column, format_name=format_name, ignored=known.ignored)
        whole: list[Message] = dialogue["messages"]
        if whole[-1]["role"] != "assistant" or len(whole) == 1:
            raise FormatError(
                f"the dialogue ends with a message of the {whole[-1]['role']}, so there is no answer to score; write "
                f"one in the column {answer}"
            )
    else:
        prompt = prompt_of(rest, column, format_name=format_name, known=known)
        whole = whole_dialogue(prompt, row[answer], answer, known)
        whole = with_system(whole, row)
    dialogue = dialogue_of(whole) | {"messages": whole[:-1], "train_all": False}
    return with_tools(dialogue, row, known.ignored) | {
        "labels": [message_text(whole[-1])],
        **answer_to_learn(whole[-1]),
    }


def rejected_dialogue(dialogue: Dialogue) -> Dialogue:
    """Return the dialogue of a pair with the rejected answer in place of the chosen one."""
    rest = {name: value for name, value in dialogue.items() if name not in ("answer", "rejected")}
    worse = dialogue["rejected"]
    return rest | {"labels": [message_text(worse)], **answer_to_learn(worse)}


def prompt_of(rest: Mapping[str, Any], column: str, *, format_name: str, known: KnownKeys) -> list[Message]:
    """Return the messages of a row without its answers; none if its columns hold no dialogue.

    Args:
        rest: The row without the columns of both answers.
        column: Column of the dialogue feature.
        format_name: Name of the format, or auto to detect it.
        known: Further message keys and columns to ignore.

    Raises:
        FormatError: They hold one that cannot be read.
    """
    if format_name not in ("auto", "chosen_rejected"):
        return messages_read(format_name, rest, column, known)
    lists = (column, *(name for names in LISTS.values() for name in names))
    if not any(holds(rest.get(name)) for name in (*lists, *PROMPTS)):
        return []
    found, column = detect_format({name: value for name, value in rest.items() if holds(value)}, column)
    return messages_read(found, rest, column, known)


def messages_read(format_name: str, rest: Mapping[str, Any], column: str, known: KnownKeys) -> list[Message]:
    """Return the messages of a format, in which the answer is missing.

    Args:
        format_name: Name of the format.
        rest: The row without the columns of both answers.
        column: Column of the messages.
        known: Further message keys and columns to ignore.
    """
    answers = {name for _, others in COLUMNS.values() for name in others} - {"input"}
    row = {name: value for name, value in rest.items() if name not in answers or name in ("prompt", column)}
    messages: list[Message] = READERS[format_name](row, column, known)["messages"]
    return messages


def whole_dialogue(prompt: list[Message], value: Any, column: str, known: KnownKeys) -> list[Message]:
    """Return the dialogue that ends with an answer.

    Args:
        prompt: The messages before the answer; empty if the answer is the whole dialogue.
        value: The answer: a text, a message or a list of messages.
        column: Column of the answer, for errors.
        known: Further message keys to ignore.

    Raises:
        FormatError: The answer does not follow the prompt, or is no answer.
    """
    messages = answers_of(value, column, known)
    if prompt and prompt[-1]["role"] == "assistant" and messages[0]["role"] != "assistant":
        prompt = prompt[: len(messages) - 1]  # a column with the whole dialogue next to both answers
    if not prompt and len(messages) == 1 and not isinstance(value, list | Mapping):
        raise FormatError(
            f"column {column} is a text without a prompt; write the column of the prompt at the input, or remove "
            "input_features if both texts begin with it"
        )
    whole = joined(prompt, messages, column)
    if whole[-1]["role"] != "assistant":
        raise FormatError(f"column {column} ends with a message of the {whole[-1]['role']}, not with an answer")
    if len(whole) > 1 and whole[-2]["role"] == "assistant":
        raise FormatError(f"column {column} is an answer after an answer; write a prompt that ends with a question")
    return whole


def answers_of(value: Any, column: str, known: KnownKeys) -> list[Message]:
    """Return an answer as messages: a text, a message or a list of messages."""
    items = [value] if isinstance(value, Mapping) else None if isinstance(value, str) else plain_list(value)
    if items is None:
        return [answer([value], f"column {column}")]
    keys = SHAREGPT if all(isinstance(item, Mapping) and "from" in item for item in items) else OPENAI
    try:
        return messages_of(items, keys, known)
    except FormatError as error:
        error.args = (f"column {column}: {error}",)
        raise


def shared_messages(better: list[Message], worse: list[Message], *, chosen: str, rejected: str) -> list[Message]:
    """Return the messages before the last ones, which both dialogues share.

    Args:
        better: The dialogue with the chosen answer.
        worse: The dialogue with the rejected answer.
        chosen: Column of the chosen answer, for errors.
        rejected: Column of the rejected answer, for errors.

    Raises:
        FormatError: They share more or less than that.
    """
    pairs = zip(said(better), said(worse), strict=False)
    common = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(better), len(worse)))
    if common == len(better) == len(worse):
        raise FormatError(f"the answers in the columns {chosen} and {rejected} are equal")
    if not common == len(better) - 1 == len(worse) - 1:
        raise FormatError(
            f"the dialogues in the columns {chosen} and {rejected} differ from message {common + 1} on, and only their "
            "last messages may differ; end both after that message"
        )
    return better[:-1]


def answer_message(message: Message) -> Message:
    """Return what an answer says, without the keys of its message."""
    return {key: message[key] for key in ANSWER_KEYS if key in message}
