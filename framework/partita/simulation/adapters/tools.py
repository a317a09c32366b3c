"""A class with `reset` and tools, as TRL's `environment_factory` takes them.

Its public methods are the tools, but `reset`, `close`, `reward` and `get_reward`. They are told to the model in a
system message, from their types and docstrings. It calls one with `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, or the bare JSON, and hears what it gives as a `tool` message. An answer without a call ends the
dialogue, and so does `done = True`. The reward is `get_reward()` or the attribute `reward`, where there is one.

A call that cannot be made, and a ValueError of a tool, are told to the model. All else that a tool raises fails the
dialogue: it is the program that is broken, and not the model that is wrong.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from partita.simulation.contract import ContractError, Message, UnfitError, messages_of, shown
from partita_schema.json_values import json_validator, schema_mistake
from partita_schema.nearest import nearest

NOT_TOOLS = ("reset", "close", "reward", "get_reward")
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FORM = '<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'


class CallError(Exception):
    """A call that the model has to hear about."""


class Tools:
    """The tools of a class."""

    def __init__(self, descriptions: Mapping[str, Any]) -> None:
        """`descriptions` by name: what the model is told, as JSON in OpenAI's form."""
        self.descriptions = dict(descriptions)
        self.validators = {name: json_validator(parameters(told)) for name, told in descriptions.items()}

    @classmethod
    def of(cls, kind: type) -> "Tools":
        """The tools of a class. Raises UnfitError where it has none, or one that nobody could explain to a model."""
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

        if not callable(getattr(kind, "reset", None)):
            raise UnfitError(f"{kind.__name__} has no method reset, which begins a dialogue")
        descriptions: dict[str, Any] = {}
        for name, tool in methods(kind).items():
            if inspect.iscoroutinefunction(tool):
                raise UnfitError(f"{kind.__name__}.{name} is async; make it a plain method")
            try:
                descriptions[name] = get_json_schema(tool)
            except (DocstringParsingException, TypeHintParsingException) as error:
                told = f"{kind.__name__}.{name} cannot be told to a model: {error}; give it types and a docstring with "
                raise UnfitError(f"{told}Args:, or a name that begins with _ where it is not a tool") from error
        if not descriptions:
            raise UnfitError(f"{kind.__name__} has no tools; its public methods but {', '.join(NOT_TOOLS)} are")
        return cls(descriptions)

    def text(self) -> str:
        """What the model is told of them."""
        lines = [json.dumps(told, ensure_ascii=False) for told in self.descriptions.values()]
        return "\n".join(["You have these tools:", *lines, f"To call one, answer with {FORM}"])

    def check(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raises CallError where there is no such tool, or it does not take these arguments."""
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
    """A program with tools as an environment."""

    def __init__(self, program: Any, tools: Tools) -> None:
        """`tools` are those of its class."""
        self.program, self.tools = program, tools
        self.earned: float | None = None
        """The reward so far."""
        self.calls = self.errors = 0

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        """The tools, the task's `prompt`, and behind it what `reset` says. It gets those columns that it asks for."""
        said = self.program.reset(**accepted(self.program.reset, {**task, "seed": seed}))
        if said is not None and not isinstance(said, str):
            raise ContractError(f"reset gave {shown(said)}; give a text or None")
        messages = messages_of(task.get("prompt", ""), "the task's prompt")
        if said and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{said}"
        elif said:
            messages.append({"role": "user", "content": said})
        if not messages:
            raise ContractError("reset said nothing, and the task has no prompt; one of them begins the dialogue")
        if messages[0]["role"] == "system":
            messages[0]["content"] += f"\n\n{self.tools.text()}"
        else:
            messages.insert(0, {"role": "system", "content": self.tools.text()})
        return list(messages), {}

    def step(self, action: str) -> tuple[list[Message], float | None, bool, bool, Mapping[str, Any]]:
        """Make all calls of an answer; one without any is the last."""
        calls = calls_of(action)
        messages: list[Message] = [{"role": "tool", "content": self.result(call)} for call in calls]
        is_over = not calls or getattr(self.program, "done", False) is True
        metrics = {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}
        return messages, self.reward(), is_over, False, {"metrics": metrics}

    def result(self, call: str) -> str:
        """What a call gives, or what is wrong with it."""
        self.calls += 1
        try:
            name, arguments = read_call(call)
            self.tools.check(name, arguments)
            found = getattr(self.program, name)(**arguments)
        except (CallError, ValueError) as error:
            self.errors += 1
            return f"error: {error}"
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    def reward(self) -> float | None:
        """What was earned since the last answer; None without a reward. Raises ContractError where it is not a
        number."""
        found = getattr(self.program, "get_reward", getattr(self.program, "reward", None))
        found = found() if callable(found) else found
        if found is None:
            return None
        try:
            earned = float(found)
        except (TypeError, ValueError):
            raise ContractError(f"the reward is {shown(found)}; give a number or None") from None
        before, self.earned = self.earned or 0.0, earned
        return earned - before

    def close(self) -> None:
        """Close it, where it can be."""
        close = getattr(self.program, "close", None)
        if callable(close):
            close()


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Public methods that are tools, by name, each with the arguments that it is called with."""
    found: dict[str, Callable[..., Any]] = {}
    for name, member in inspect.getmembers_static(kind, is_method):
        if not name.startswith("_") and name not in NOT_TOOLS:
            found[name] = MethodType(member, kind) if inspect.isfunction(member) else getattr(kind, name)
    return found


def is_method(member: object) -> bool:
    """Whether a member of a class can be called on its objects. A property is not looked at: it may cost something."""
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)


def parameters(description: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of the arguments; `nullable`, which is OpenAPI's, in JSON Schema's words."""
    found = dict(description["function"]["parameters"])
    found["properties"] = {
        name: {"anyOf": [told, {"type": "null"}]} if told.get("nullable") else told
        for name, told in found["properties"].items()
    }
    return found


def accepted(method: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those columns that a method takes by name; all where it takes any."""
    taken = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in taken}


def calls_of(answer: str) -> list[str]:
    """The calls in an answer, each as the JSON that it should be; none where it is no call."""
    marked = [call.strip() for call in CALL.findall(answer)]
    if marked:
        return marked
    try:
        read_call(answer)
    except CallError:
        return []
    return [answer]


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call. Raises CallError where it is none."""
    try:
        call = json.loads(text)
        found = call["arguments"] if "arguments" in call else call["parameters"]
        arguments = json.loads(found) if isinstance(found, str) else found
    except (ValueError, TypeError, KeyError):
        raise CallError(f"a call is {FORM}") from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise CallError(f"a call is {FORM}")
    return call["name"], arguments
