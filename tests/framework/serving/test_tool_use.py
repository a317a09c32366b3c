"""Tests of tool calls in answers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from partita.data.formatting.chat import ChatTemplate
from partita.serving.openai_chats import AskedTools
from partita.serving.tool_use import (
    NO_ARGUMENTS,
    CallForm,
    ToolCall,
    arguments_schema,
    call_form,
    call_grammar,
    calls_in,
    objects_in,
)
from partita_schema.errors import RowError

from ..data.formatting.chat_templates import FAMILIES

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
QWEN = CallForm("<tool_call>\n", "\n</tool_call>", "arguments")


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It rains.", "It rains.", []),
        (call("weather", town="Oslo"), "", [("weather", {"town": "Oslo"})]),
        (f"<tool_call>\n{call('time')}\n</tool_call>", "", [("time", {})]),
        (f"I look.\n<tool_call>\n{call('time')}\n</tool_call>", "I look.", [("time", {})]),
        (
            f"<tool_call>\n{call('time')}\n</tool_call>\n<tool_call>\n{call('weather', a={'b': [1]})}\n</tool_call>",
            "",
            [("time", {}), ("weather", {"a": {"b": [1]}})],
        ),
        (f"[{call('time')}, {call('time', zone='x')}]", "[", [("time", {}), ("time", {"zone": "x"})]),
        ('{"name": "weather", "parameters": {"town": "Oslo"}}', "", [("weather", {"town": "Oslo"})]),
        ('{"function": {"name": "time", "arguments": {}}}', "", [("time", {})]),
        (call("unknown"), call("unknown"), []),
        ('{"name": ["time"], "arguments": {}}', '{"name": ["time"], "arguments": {}}', []),
        ('{"name": "time"}', '{"name": "time"}', []),
        ('{"name": "time", "arguments": "now"}', '{"name": "time", "arguments": "now"}', []),
        ('{"name": "time", "arguments": "{\\"zone\\": \\"x\\"}"}', "", [("time", {"zone": "x"})]),
        ('{"name": "time", "arguments": null}', "", [("time", {})]),
        ('{"name": "time", "arguments": {"zone": NaN}}', '{"name": "time", "arguments": {"zone": NaN}}', []),
        ('{"name": "time", "argum', '{"name": "time", "argum', []),
    ],
)
def test_calls_of_an_answer(text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    found_content, found = calls_in(text, tools=TOOLS, form=QWEN)
    assert found_content == content
    assert [(one.name, json.loads(one.arguments)) for one in found] == calls


def test_half_of_a_surrogate_pair_in_an_argument_can_be_sent() -> None:
    _, [found] = calls_in(call("time", zone="\ud83d"), tools=TOOLS, form=QWEN)
    assert found.arguments.encode("utf8") == b'{"zone": "\\ud83d"}'


def test_without_parallel_calls_only_the_first_call_is_returned() -> None:
    text = f"I look.\n<tool_call>\n{call('time')}\n</tool_call>\n<tool_call>\n{call('weather')}\n</tool_call>"
    several, one = (AskedTools(TOOLS, QWEN, None, several=several).calls_in(text) for several in (True, False))
    assert several == ("I look.", [ToolCall("time", "{}"), ToolCall("weather", "{}")])
    assert one == ("I look.", [ToolCall("time", "{}")])


SYNTAX = '[]":,\\ ab1'


@given(st.text(SYNTAX, max_size=20), st.text("{}" + SYNTAX, max_size=20))
def test_an_object_in_any_text_is_found(before: str, after: str) -> None:
    known = '{"a": [{"b": "}"}]}'
    text = before + known + after
    first, *others = objects_in(text)
    assert (first.start, first.end, first.value) == (len(before), len(before + known), json.loads(known))
    for found in others:
        assert json.loads(text[found.start : found.end]) == found.value


@given(st.text("{}" + SYNTAX, max_size=40))
def test_objects_in_any_text_are_where_they_are_said_to_be(text: str) -> None:
    for found in objects_in(text):
        assert json.loads(text[found.start : found.end]) == found.value


def test_a_deeply_nested_text_is_no_call() -> None:
    assert objects_in("{" + '"a":{' * 50_000) == []


def test_identifiers_of_calls_differ() -> None:
    assert len({ToolCall("time", "{}").as_openai()["id"] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}, "required": []},
    ],
)
def test_a_tool_without_parameters_has_no_arguments(parameters: dict[str, Any]) -> None:
    assert arguments_schema(parameters) == NO_ARGUMENTS


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "additionalProperties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"type": "object", "properties": {"town": {}}},
        {"anyOf": [{"type": "object"}]},
    ],
)
def test_parameters_of_a_tool_are_the_schema_of_its_arguments(parameters: dict[str, Any]) -> None:
    assert arguments_schema(parameters) == parameters


FORMS = {
    "llama 3": CallForm("", "", "parameters"),
    "qwen 2.5": QWEN,
    "qwen 3": QWEN,
    "mistral": CallForm("[", "]", "arguments"),
    "granite 3": CallForm("[", "]", "arguments"),
}
"""How families of models write calls, without special tokens; the others of the tests write none as JSON."""


def test_marks_of_calls_that_have_no_role_are_special_tokens_too() -> None:
    tokenizer = FAMILIES["mistral"]._replace(tokens=()).tokenizer()
    marks = [AddedToken(token, special=True) for token in FAMILIES["mistral"].tokens]
    tokenizer.add_tokens(marks)
    assert "[TOOL_CALLS]" not in tokenizer.all_special_tokens

    assert call_form(ChatTemplate(tokenizer, system=None), tokenizer) == FORMS["mistral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_calls_is_that_of_the_chat_template(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    template = ChatTemplate(tokenizer, system=None)
    if family in FORMS:
        assert call_form(template, tokenizer) == FORMS[family]
        return
    with pytest.raises(RowError, match="does not write tool calls as JSON objects; leave tools out"):
        call_form(template, tokenizer)


def fits(text: str, grammar: str) -> bool:
    """Return whether a text is a whole answer by a grammar."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar), log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_a_required_call_has_the_arguments_of_its_tool() -> None:
    place = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
    parameters = {
        "$defs": {"Place": place},
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place"}},
        "required": ["place"],
    }
    tools = [{"function": {"name": "weather", "parameters": parameters}}, {"function": {"name": 'the "time"'}}]
    grammar = call_grammar(tools, form=QWEN)

    def whole(text: str) -> str:
        return f"{QWEN.before}{text}{QWEN.after}"

    assert fits(whole(call("weather", place={"town": "Oslo"})), grammar)
    assert fits(whole('{"name":"weather","arguments":{"place":{"town":"Oslo"}}}'), grammar)
    assert fits(whole(call('the "time"')), grammar)
    assert not fits(whole(call("weather")), grammar)
    assert not fits(whole(call('the "time"', place={"town": "Oslo"})), grammar)
    assert not fits(whole(call("other")), grammar)
