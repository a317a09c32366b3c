"""How a chat template takes tool calls, and checks that it writes all of a message.

Templates differ: most write arguments that are an object as JSON, some concatenate text and need JSON text; some demand
an id of nine letters or digits for each call. A trial call finds out which form a template takes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita.data.rows import digest
from partita_schema.errors import ModelError, RowError

Message = Mapping[str, Any]
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Ids that every template takes."""
TRIAL_NAME, KEY, VALUE = "trial_function", "trial_key", "trial value"
TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": TRIAL_NAME,
        "description": "A trial.",
        "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": "A value."}}},
    },
}
TRIAL_CALL = {"type": "function", "function": {"name": TRIAL_NAME, "arguments": {KEY: VALUE}}}


@dataclass(frozen=True)
class ToolCallForm:
    """The form of tool calls that a template takes."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text; else they are objects."""
    short_ids: bool = False
    """Whether each call has an id of nine letters or digits; else ids are as in the data."""

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message in this form."""
        shown = dict(message)
        if "tool_calls" in message:
            shown["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if "tool_call_id" in message:
            shown["tool_call_id"] = self._id(message["tool_call_id"])
        return shown

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages of a dialogue. Results without an id get those of the calls before them, in order."""
        shown: list[dict[str, Any]] = []
        open_ids: list[str] = []
        for message in messages:
            shown.append(self.message(message))
            if message.get("tool_calls") and self.short_ids:
                open_ids = [call["id"] for call in shown[-1]["tool_calls"]]
            elif message["role"] == "tool" and open_ids:
                shown[-1].setdefault("tool_call_id", open_ids[0])
                open_ids = [each for each in open_ids if each != shown[-1]["tool_call_id"]]
        return shown

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        shown = {**call, "function": function}
        if self.short_ids:
            shown["id"] = self._id(call.get("id") or json.dumps(call["function"], sort_keys=True))
        return shown

    def _id(self, text: str) -> str:
        if not self.short_ids or SHORT_ID.fullmatch(text):
            return text
        return digest(text)[:9]


FORMS = tuple(ToolCallForm(as_text, short) for short in (False, True) for as_text in (False, True))
"""All forms, the most common first."""


def form_of(render: Callable[[Sequence[Message]], str]) -> ToolCallForm:
    """Return the first form in which a template writes the arguments of a trial call; the default if there is none.

    `render` renders messages with the trial tool.
    """
    for form in FORMS:
        messages = form.messages(
            [
                {"role": "user", "content": "QUESTION"},
                {"role": "assistant", "content": "", "tool_calls": [TRIAL_CALL]},
                {"role": "tool", "name": TRIAL_NAME, "content": "RESULT"},
            ]
        )
        try:
            text = render(messages)
        except ModelError:
            continue
        # Python's quotes, or quotes within quotes, are not the JSON of an object.
        if VALUE in text and f"'{KEY}'" not in text and f'\\"{KEY}' not in text:
            return form
    return FORMS[0]


def check_is_written(
    messages: Sequence[Message], text: str, *, tools: Sequence[Mapping[str, Any]], writes_tools: bool
) -> None:
    """Raise RowError if a template left out tools, tool calls, or results of tools.

    Args:
        messages: The messages of the prompt.
        text: The rendered prompt.
        tools: The tools of the dialogue.
        writes_tools: Whether the template writes tools at all; a call may have the name of a tool, too.
    """
    for tool in tools:
        if not writes_tools or not is_written(tool["function"]["name"], text):
            raise left_out(f"the tool {tool['function']['name']}", "tools")
    for message in messages:
        check_calls(message, text)
        if message["role"] == "tool" and not is_written(message["content"], text):
            raise left_out(f"the result {shortened_json(message['content'])} of a tool")


def check_answer(answer: Message, text: str) -> None:
    """Raise RowError if what a template wrote for an answer lacks its content, reasoning or tool calls."""
    check_calls(answer, text)
    if not is_written(answer["content"], text):
        call = " next to a tool call" if answer.get("tool_calls") else ""
        raise left_out(f"the answer {shortened_json(answer['content'])}{call}")
    reasoning = answer.get("reasoning_content", "")
    if not is_written(reasoning, text):
        raise left_out(f"the reasoning {shortened_json(reasoning)}", "reasoning_content")


def check_calls(message: Message, text: str) -> None:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    for function in functions:
        # Of several calls, a template may write the first alone, and the arguments of the others may be in it, too.
        num_calls = sum(other["name"] == function["name"] for other in functions)
        written = text.count(function["name"]) >= num_calls
        if not written or not all(is_written(part, text) for part in leaves(function["arguments"])):
            raise left_out(f"the tool call {function['name']}", "tool_calls")


def left_out(what: str, key: str = "") -> RowError:
    ignore = f", or data.dialogue: {{ignore_keys: [{key}]}}" if key else ""
    return RowError(f"the chat template leaves out {what}; use a model whose template writes it{ignore}")


def leaves(value: Any) -> Iterator[str]:
    """Yield the keys, texts and numbers of a JSON value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield str(value)


def is_written(part: str, text: str) -> bool:
    """Return whether a rendered text contains a part, as it is or within JSON."""
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=ascii_)[1:-1] in text for ascii_ in (False, True))


def shortened_json(text: str) -> str:
    return json.dumps(text[:60], ensure_ascii=False)
