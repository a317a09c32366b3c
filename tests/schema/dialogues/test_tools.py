"""Tests of tool calls, tools and reasoning in the rows of datasets."""

import json
from typing import Any

import pytest

from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.read import read_dialogue, unread_keys

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "x"}


def assistant(**keys: Any) -> dict[str, Any]:
    """Return a row whose second message is the assistant's."""
    return {"messages": [ASK, {"role": "assistant"} | keys]}


def second(row: dict[str, Any], **options: Any) -> dict[str, Any]:
    message: dict[str, Any] = read_dialogue(row, column="messages", **options)["messages"][1]
    return message


@pytest.mark.parametrize(
    "keys",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [json.dumps(CALL)], "content": ""},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "index": 0}]},
        {"tool_calls": [{"name": "f", "arguments": {"a": 1, "b": None}}], "content": None},
        {"function_call": {"name": "f", "arguments": '{"a": 1}'}},
    ],
)
def test_tool_calls_have_one_form_with_objects_as_arguments(keys: dict[str, Any]) -> None:
    assert second(assistant(**keys)) == {"role": "assistant", "content": "", "train": True, "tool_calls": [CALL]}


def test_null_arguments_of_tables_are_left_out_and_those_of_json_text_are_kept() -> None:
    for written, read in (({"a": None, "b": [{"c": None}]}, {"b": [{}]}), ('{"a": null}', {"a": None}), ("", {})):
        [call] = second(assistant(tool_calls=[{"name": "f", "arguments": written}]))["tool_calls"]
        assert call["function"]["arguments"] == read


def test_a_call_keeps_its_id_and_a_result_the_id_and_name_of_its_call() -> None:
    result = {"role": "tool", "content": {"sky": "bl\u00fce"}, "name": "f", "tool_call_id": "1"}

    messages = read_dialogue(
        {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL | {"id": "1"}]}, result]}, column="messages"
    )["messages"]

    assert messages[1]["tool_calls"] == [CALL | {"id": "1"}]
    assert messages[2] == result | {"content": '{"sky": "bl\u00fce"}'}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_one_name(key: str) -> None:
    assert second(assistant(content="y", **{key: "so"}))["reasoning_content"] == "so"


def test_tools_are_read_from_columns_as_lists_or_json_text() -> None:
    bare = TOOL["function"]
    for column, value in (("tools", [TOOL]), ("tools", json.dumps([bare])), ("functions", [bare | {"strict": None}])):
        dialogue = read_dialogue({"messages": [ASK], column: value}, column="messages")
        assert dialogue["tools"] == [TOOL]
        assert "tools" not in read_dialogue({"messages": [ASK], column: value}, column="messages", ignored=[column])


def test_ignored_keys_of_calls_and_reasoning_are_not_read() -> None:
    row = assistant(content="y", tool_calls=[CALL], reasoning_content="so")
    assert second(row, ignored=["tool_calls", "reasoning_content"]) == {
        "role": "assistant",
        "content": "y",
        "train": True,
    }
    assert unread_keys(row, column="messages") == []


def test_roles_of_sharegpt_call_tools() -> None:
    said = [("human", "x"), ("function_call", json.dumps(CALL["function"])), ("observation", "1"), ("gpt", "y")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}

    messages = read_dialogue(row, column="messages")["messages"]

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1] == {"role": "assistant", "content": "", "train": True, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (assistant(tool_calls=[{"id": 1}]), "message 2: tool call 1 has no name; write name and arguments"),
        (assistant(tool_calls=[3]), "message 2: tool call 1 is not a mapping; write name and arguments"),
        (
            {"messages": '[{"role": "user", "content": "a", "content": "b"}]'},
            "the key 'content' occurs twice in an object; remove or rename one",
        ),
        (
            assistant(tool_calls='[{"name": "f", "name": "g"}]'),
            "the key 'name' occurs twice in an object; remove or rename one",
        ),
        (assistant(tool_calls="f(1)"), "message 2: the tool call: 'f(1)' is not JSON (Expecting value: line 1"),
        (
            assistant(tool_calls=[{"type": "web_search", "query": "x"}]),
            "message 2: tool call 1 is of type 'web_search'; only calls of functions are read",
        ),
        (
            assistant(tool_calls=[{"name": "f", "parameters": {"a": 1}}]),
            "message 2: tool call 1 has parameters; only id, type, name and arguments are read",
        ),
        (
            assistant(tool_calls=[CALL, {"name": "f", "arguments": "[1]"}]),
            "message 2: tool call 2 (f): the arguments are not an object; write a JSON object",
        ),
        (
            assistant(tool_calls=[{"name": "f", "arguments": "{a: 1}"}]),
            "message 2: tool call 1 (f): arguments: '{a: 1}' is not JSON",
        ),
        (
            assistant(tool_calls=[CALL], labels=["a", "b"]),
            "message 2 has several labels with tool calls or reasoning; write one answer",
        ),
        (
            assistant(content="y", thinking="a", reasoning="b"),
            "message 2 has several texts of reasoning; write reasoning_content alone",
        ),
        (assistant(content="y", thinking={"a": 1}), "message 2: thinking is not text"),
        (assistant(reasoning_content="a"), "message 2: content is missing"),
        (
            {"messages": [ASK, {"role": "tool", "content": "1", "name": 3}]},
            "message 2: name is not text",
        ),
        ({"messages": [ASK], "tools": "search"}, "column tools: 'search' is not JSON"),
        (
            {"messages": [ASK], "tools": [{"description": "a"}]},
            "column tools: tool 1 has no name; write name, description and parameters",
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f()"}]},
            "message 2: the tool call: 'f()' is not JSON",
        ),
        (
            assistant(tool_calls=[{"name": "f", "arguments": '{"a":' * 200 + "1" + "}" * 200}]),
            "message 2: tool call 1 (f): arguments is nested more than 100 levels deep",
        ),
    ],
)
def test_an_invalid_call_or_tool_is_reported_with_its_position(row: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_dialogue(row, column="messages")
    assert says in str(caught.value)
