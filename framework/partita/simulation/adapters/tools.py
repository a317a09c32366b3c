"""Adapter for a class with `reset` and tools, the interface of TRL's `environment_factory`.

Its public methods are the tools, except `reset`, `close`, `reward` and `get_reward`. A system message describes them to
the model, from their types and docstrings. The model calls a tool with `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, or the bare JSON, and receives the result as a `tool` message. An answer without a call ends the
dialogue, and so does `done = True`. The reward is `get_reward()` or the attribute `reward`, if there is one.

An invalid call and a ValueError of a tool are returned to the model. Any other exception of a tool fails the dialogue:
it means that the program is broken, not that the model made a mistake.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from partita.simulation.contract import (
    ContractError,
    InterfaceError,
    Message,
    close_program,
    format_value,
    messages_of,
    truth_of,
)
from partita_schema.common.json_text import parse_json
from partita_schema.common.text import nearest
from partita_schema.json_values import json_validator, schema_mistake

NOT_TOOLS = ("reset", "close", "reward", "get_reward")
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FORM = '<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'


class CallError(Exception):
    """An error in a call, returned to the model."""


class Tools:
    """The tools of a class."""

    def __init__(self, descriptions: Mapping[str, Any]) -> None:
        """`descriptions` are the descriptions for the model by name, in OpenAI's JSON format."""
        self.descriptions = dict(descriptions)
        self.validators = {name: json_validator(parameters(tool)) for name, tool in descriptions.items()}

    @classmethod
    def of(cls, kind: type) -> "Tools":
        """Describe the tools of a class. Raises InterfaceError if it has none, or one without types and a docstring."""
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        if not callable(getattr(kind, "reset", None)):
            raise InterfaceError(f"{kind.__name__} has no method reset, which begins a dialogue")
        descriptions: dict[str, Any] = {}
        for name, tool in methods(kind).items():
            if inspect.iscoroutinefunction(tool):
                raise InterfaceError(f"{kind.__name__}.{name} is async; make it a plain method")
            try:
                descriptions[name] = get_json_schema(tool)
            except (DocstringParsingException, TypeHintParsingException) as error:
                reason = (
                    f"{kind.__name__}.{name} cannot be described to a model: {error}; give it types and a docstring "
                    "with "
                )
                raise InterfaceError(f"{reason}Args:, or a name that begins with _ where it is not a tool") from error
        if not descriptions:
            raise InterfaceError(f"{kind.__name__} has no tools; its public methods but {', '.join(NOT_TOOLS)} are")
        return cls(descriptions)

    def text(self) -> str:
        """Return the description of the tools for the system message."""
        lines = [json.dumps(tool, ensure_ascii=False) for tool in self.descriptions.values()]
        return "\n".join(["You have these tools:", *lines, f"To call one, answer with {FORM}"])

    def check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Check a call. Raises CallError if the tool does not exist or does not take these arguments."""
        if name not in self.descriptions:
            near = nearest(name, self.descriptions)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(self.descriptions)}"
            raise CallError(f"no tool is named {name}; {hint}")
        known = self.descriptions[name]["function"]["parameters"]["properties"]
        for argument in arguments:
            if argument not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise CallError(f"{name} has no argument {argument}; {takes}")
        mistake = schema_mistake(self.validators[name], dict(arguments))
        if mistake is not None:
            raise CallError(f"{name}: {mistake}")


class ToolEnvironment:
    """A program with tools as a `partita.simulation.contract.Environment`."""

    def __init__(self, program: Any, tools: Tools) -> None:
        """`tools` are the tools of the program's class."""
        self.program, self.tools = program, tools
        self.given = 0.0
        """Sum of the rewards of all steps so far."""
        self.calls = self.errors = 0

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        """Begin an episode. Returns the tools, the task's `prompt` and the text of `reset` as messages.

        The program's `reset` receives the columns of the task that it has as parameters.
        Raises ContractError if there is no first message.
        """
        reply = self.program.reset(**accepted_columns(self.program.reset, {**task, "seed": seed}))
        if reply is not None and not isinstance(reply, str):
            raise ContractError(f"reset gave {format_value(reply)}; give a text or None")
        messages = messages_of(task.get("prompt", ""), "the task's prompt")
        if reply and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{reply}"
        elif reply:
            messages.append({"role": "user", "content": reply})
        if not messages:
            raise ContractError("reset said nothing, and the task has no prompt; one of them begins the dialogue")
        if messages[0]["role"] == "system":
            messages[0]["content"] += f"\n\n{self.tools.text()}"
        else:
            messages.insert(0, {"role": "system", "content": self.tools.text()})
        return list(messages), {}

    def step(self, action: str) -> tuple[list[Message], float | None, bool, bool, Mapping[str, Any]]:
        """Run all calls of an answer; an answer without calls ends the dialogue."""
        calls = calls_of(action)
        messages: list[Message] = [{"role": "tool", "content": self.result(call)} for call in calls]
        done = getattr(self.program, "done", False)
        is_over = not calls or (not callable(done) and truth_of(done, "the program", name="done"))
        metrics = {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}
        return messages, self.reward(), is_over, False, {"metrics": metrics}

    def result(self, call: str) -> str:
        """Run a call and return its result, or its error, as text."""
        self.calls += 1
        try:
            name, arguments = read_call(call)
            self.tools.check(name, arguments)
            value = getattr(self.program, name)(**arguments)
        except (CallError, ValueError) as error:
            self.errors += 1
            return f"error: {error}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    def reward(self) -> float | None:
        """Return the reward since the last answer; None without one. Raises ContractError if it is not a number."""
        total = getattr(self.program, "get_reward", getattr(self.program, "reward", None))
        total = total() if callable(total) else total
        if total is None:
            return None
        try:
            earned = float(total)
        except (TypeError, ValueError):
            raise ContractError(f"the reward is {format_value(total)}; give a number or None") from None
        # Relative to the sum that the episode has, so that rounding errors do not add up.
        reward = earned - self.given
        self.given += reward
        return reward

    def close(self) -> None:
        """Close the program if it has a method `close`."""
        close_program(self.program)


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods that are tools, by name, bound so that `self` is not an argument."""
    tools: dict[str, Callable[..., Any]] = {}
    for name, member in inspect.getmembers_static(kind, is_method):
        if not name.startswith("_") and name not in NOT_TOOLS:
            tools[name] = MethodType(member, kind) if inspect.isfunction(member) else getattr(kind, name)
    return tools


def is_method(member: object) -> bool:
    """Return whether a class member is a method. Properties are not evaluated, since that may be expensive."""
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)


def parameters(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of the arguments, with OpenAPI's `nullable` converted to a type `null`."""
    schema = dict(description["function"]["parameters"])
    schema["properties"] = {
        name: {"anyOf": [argument, {"type": "null"}]} if argument.get("nullable") else argument
        for name, argument in schema["properties"].items()
    }
    return schema


def accepted_columns(method: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a method has as parameters; all of them if it takes `**kwargs`."""
    taken = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in taken}


def calls_of(answer: str) -> list[str]:
    """Return the text of each call in an answer, which should be JSON; empty for an answer without calls."""
    marked = [call.strip() for call in CALL.findall(answer)]
    if marked:
        return marked
    try:
        read_call(answer)
    except CallError:
        return []
    return [answer]


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a call into name and arguments. Raises CallError if it is not valid."""
    try:
        call = parse_json(text)
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError):
        raise CallError(f"a call is {FORM}") from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise CallError(f"a call is {FORM}")
    return call["name"], arguments
