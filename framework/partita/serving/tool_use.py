"""Tool calls in answers: which part of a generated text is a call, and the grammar of an answer that must be one.

Models write a call as a JSON object with its name and arguments, between marks of their chat template. The marks are
found by rendering an answer with a trial call.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from partita.data.formatting.chat import ChatTemplate
from partita.data.formatting.tool_calls import TRIAL_CALL, TRIAL_NAME, TRIAL_TOOL
from partita.lm.decoding.grammar import special_ids
from partita_schema.common.json_text import parse_json
from partita_schema.errors import ModelError, RowError
from partita_schema.sections.outputs.grammar_rules import json_rule, quoted, whole_grammar

ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""JSON schema of the arguments of a tool without parameters."""
ANNOTATIONS = {"type", "title", "description", "$schema"}
"""Keys of a JSON schema that name no parameter."""


class ToolCall(NamedTuple):
    """A call of a tool in an answer."""

    name: str
    arguments: str
    """The arguments as a JSON object."""

    def as_openai(self) -> dict[str, Any]:
        """Return the call in the form of the OpenAI API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class CallForm:
    """Format of the tool calls of a model."""

    before: str
    """Text before the object, without special tokens."""
    after: str
    """Text after it."""
    key: str
    """Key of the arguments."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts with which a call may start."""
        return tuple(dict.fromkeys(text for text in (self.before.strip(), "{", "[") if text))


def call_form(template: ChatTemplate, tokenizer: Any) -> CallForm:
    """Return the format of calls in a chat template. Raise RowError if the template does not write them."""
    asked = [{"role": "user", "content": "QUESTION"}]
    said = {"role": "assistant", "content": "", "tool_calls": [TRIAL_CALL]}
    try:
        prompt = template.apply(asked, prompt=True, tools=[TRIAL_TOOL])
        whole = template.dialogue([*asked, said], marks=False, tools=[TRIAL_TOOL]).text
    except ModelError as error:
        raise RowError(f"tools: {error}") from error
    added = whole.removeprefix(prompt)
    found = next((call for call in objects_in(added) if call.value.get("name") == TRIAL_NAME), None)
    if found is None or not whole.startswith(prompt):
        raise RowError("the model's chat template does not write tool calls as JSON objects; leave tools out")
    key = next((key for key in ARGUMENT_KEYS if key in found.value), ARGUMENT_KEYS[0])
    before, after = added[: found.start], added[found.end :]
    for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))):
        before, after = before.replace(token, ""), after.partition(token)[0]
    return CallForm(before.lstrip(), after.rstrip(), key)


class FoundObject(NamedTuple):
    """A JSON object in a text."""

    start: int
    end: int
    value: dict[str, Any]


def objects_in(text: str) -> list[FoundObject]:
    """Return the outermost JSON objects of a text."""
    decoder, found, start = json.JSONDecoder(), list[FoundObject](), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError:
            break
        except ValueError:
            end = start + 1
        else:
            if isinstance(value, dict):
                found.append(FoundObject(start, end, value))
        start = text.find("{", end)
    return found


def calls_in(text: str, *, tools: Sequence[Mapping[str, Any]], form: CallForm) -> tuple[str, list[ToolCall]]:
    """Return the text of an answer before its first call, and its calls of these tools.

    Args:
        text: The generated text.
        tools: The tools of the request.
        form: How the model writes calls.
    """
    names = {tool["function"]["name"] for tool in tools}
    calls, first = list[ToolCall](), len(text)
    for found in objects_in(text):
        called = found.value.get("function", found.value)
        name = called.get("name") if isinstance(called, dict) else None
        if not isinstance(name, str) or name not in names:
            continue
        arguments = arguments_of(called)
        if arguments is not None:
            calls.append(ToolCall(name, arguments))
            first = min(first, found.start)
    content = text[:first]
    if calls:
        content = content.rstrip().removesuffix(form.before.strip()).rstrip()
    return content, calls


def arguments_of(call: Mapping[str, Any]) -> str | None:
    """Return the arguments of a call as a JSON object; None if it has none, or they are no valid JSON.

    Some models write them as a text with JSON, and null for a tool without parameters.
    """
    key = next((key for key in ARGUMENT_KEYS if key in call), None)
    if key is None:
        return None
    arguments = {} if call[key] is None else call[key]
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(arguments, allow_nan=False) if isinstance(arguments, dict) else None
    except ValueError:  # no JSON, or NaN, which clients cannot read
        return None


def arguments_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of a call: no arguments, if the parameters of the tool name none."""
    said = {key for key, value in parameters.items() if value or key == "additionalProperties"}
    return NO_ARGUMENTS if said <= ANNOTATIONS else parameters


def call_grammar(tools: Sequence[Mapping[str, Any]], *, form: CallForm) -> str:
    """Return the grammar of an answer that is a call of one of these tools.

    The arguments of each tool have a rule of their own, because references such as `#/$defs/Place` start at the root of
    a JSON schema.
    """
    rules = ['SPACE: " "', f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        texts = ('{"name":', f"{quoted(tool['function']['name'])},", f"{quoted(form.key)}:")
        start = "".join(f"{quoted(text)} SPACE? " for text in texts)
        rules.append(f'call{index}: {start}arguments{index} "}}"')
        rules.append(json_rule(f"arguments{index}", arguments_schema(tool["function"].get("parameters") or {})))
    before = [quoted(form.before)] if form.before else []
    after = [quoted(form.after)] if form.after else []
    start = " ".join([*before, "call", *after])
    return whole_grammar(start, rules, lead=False)
