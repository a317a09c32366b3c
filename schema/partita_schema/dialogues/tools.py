"""Tool calls and tool definitions, in the form that chat templates take.

Arguments are objects, also where the data has them as JSON text. Templates write them with their own spaces, so the
spaces of a JSON text are not kept. Members that are null are left out of objects: tables (Parquet, Arrow, the Hub)
have a null for each argument that any other call has. In JSON text they are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.values import holds, parsed_json, plain_list

ToolCall = dict[str, Any]
CALL_KEYS = frozenset(("id", "type", "function", "index"))
FUNCTION_KEYS = frozenset(("name", "arguments"))


def tool_calls_of(value: object, where: str) -> list[ToolCall]:
    """Return tool calls: `{type: function, function: {name, arguments}}`, with `id` if the data has it.

    Args:
        value: A list of calls, or one call, also as JSON text. A call may be the function alone.
        where: The position in the row, for errors.

    Raises:
        FormatError: A call is invalid.
    """
    items = plain_list(value)
    if items is None:
        items = [parsed_json(value, f"{where}: the tool call")]
    return [tool_call_of(item, f"{where}: tool call {number}") for number, item in enumerate(items, start=1)]


def tool_call_of(item: object, where: str) -> ToolCall:
    item = parsed_json(item, where)
    if not isinstance(item, Mapping):
        raise FormatError(f"{where} is not a mapping; write name and arguments")
    kind = item.get("type")
    if kind not in (None, "function"):
        raise FormatError(f"{where} is of type {kind!r}; only calls of functions are read")
    function: Any = parsed_json(item.get("function"), where) if holds(item.get("function")) else item
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise FormatError(f"{where} has no name; write name and arguments")
    read = CALL_KEYS if function is not item else CALL_KEYS | FUNCTION_KEYS
    unread = [key for key in item if key not in read and holds(item[key])]
    unread += [key for key in function if function is not item and key not in FUNCTION_KEYS and holds(function[key])]
    if unread:
        raise FormatError(f"{where} has {', '.join(map(str, unread))}; only id, type, name and arguments are read")
    named = f"{where} ({function['name']})"
    call: ToolCall = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments_of(function.get("arguments"), named)},
    }
    return ({"id": item["id"]} if isinstance(item.get("id"), str) and item["id"] else {}) | call


def arguments_of(value: object, where: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Raise FormatError if they are none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    arguments = parsed_json(value, f"{where}: arguments")
    if not isinstance(arguments, Mapping):
        raise FormatError(f"{where}: the arguments are not an object; write a JSON object")
    return dict(arguments) if isinstance(value, str) else without_nulls(arguments)


def tools_of(value: object, where: str) -> list[dict[str, Any]]:
    """Return tool definitions: `{type: function, function: {name, description, parameters}}`.

    Args:
        value: A list of definitions, or one, also as JSON text. A definition may be the function alone.
        where: The column, for errors.

    Raises:
        FormatError: A definition has no name.
    """
    items = plain_list(value)
    if items is None:
        items = [parsed_json(value, where)]
    tools = []
    for number, item in enumerate(items, start=1):
        tool = parsed_json(item, f"{where}: tool {number}")
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise FormatError(f"{where}: tool {number} has no name; write name, description and parameters")
        plain = dict(tool) if isinstance(item, str) or isinstance(value, str) else without_nulls(tool)
        tools.append(plain if "function" in plain else {"type": "function", "function": plain})
    return tools


def without_nulls(value: Any) -> Any:
    """Return a JSON value without members that are null, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_nulls(inner) for inner in value]
    return without_nulls(value.tolist()) if hasattr(value, "tolist") else value
