"""Interfaces of environments and checkers, and the checks of what they return.

An environment follows Gymnasium's interface (Towers et al. 2024), with messages as observations and a text as action.
One instance serves one episode. Its behavior must depend only on the seed passed to `reset` and on the answers; the
episode is then the same in any batch and on any rank.
"""

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from partita.data.episode import Episode
from partita_schema.cells import CellError, compact_json, plain_json
from partita_schema.common.text import describe_error
from partita_schema.errors import raised_at, shortened

Message = Mapping[str, Any]
"""A message with `role` (system, user, assistant or tool) and `content`."""

ROLES = ("system", "user", "assistant", "tool")
OWN_METRICS = re.compile(
    r"reward|success|exact_turns|exact_last|rounds|turns|.*\.n|exact, turn [0-9]+|.*, failures as 0|pass[@^][0-9]+"
)
"""Names in the results of a simulation, which metrics of programs cannot have."""


class Environment(Protocol):
    """Interface of environments, which answer the model. A text in place of messages is one message of the user.

    `info` may hold `gold`, the expected answer to the last message, and `metrics`, numbers by name. An environment may
    also have `close()`, which releases its resources after the episode.
    """

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> "tuple[str | Sequence[Message], Mapping[str, Any]]":
        """Start an episode for a task and return its first messages and info."""

    def step(self, action: str) -> "tuple[str | Sequence[Message], float | None, bool, bool, Mapping[str, Any]]":
        """Process the model's answer and return messages, reward (or None), terminated, truncated and info."""


def close_program(program: Any) -> None:
    """Close a program if it has a method `close`."""
    close = getattr(program, "close", None)
    if callable(close):
        close()


@dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    ok: bool
    """Whether the episode succeeded."""
    feedback: str | Sequence[Message] = ()
    """Messages to the model before it tries again; empty if it should not try again."""
    target: str | None = None
    """Expected last answer of the model, if known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name."""


class Checker(Protocol):
    """Interface of checkers, which judge finished episodes."""

    def check(self, episode: Episode) -> Verdict:
        """Return the verdict on an episode. Read only its `task` and `messages`, and change nothing."""


class ContractError(Exception):
    """An environment, agent, world or checker broke its contract."""


class StepTimeoutError(Exception):
    """A step exceeded its time limit. The argument is the limit in seconds."""

    def __str__(self) -> str:
        return f"no answer within {self.args[0]:g} s (limits.step_seconds)"


def describe_program_error(error: BaseException) -> str:
    """Format an exception of user code for a message, with the innermost line of that code."""
    return str(error) if isinstance(error, ContractError) else f"{describe_error(error)}{raised_at(error)}"


class InterfaceError(ContractError):
    """A program does not have the interface that the configuration names."""


@dataclass(frozen=True)
class EnvironmentReply:
    """The reply of an environment to `reset` or `step`."""

    messages: Sequence[Message]
    info: Mapping[str, Any]
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False


def check_reset_result(result: Any) -> EnvironmentReply:
    """Validate the result of `reset`. Raises ContractError."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ContractError(f"reset gave {format_value(result)}; give (messages, info)")
    messages, info = result
    return EnvironmentReply(messages_of(messages, "reset"), info_of(info, "reset"))


def check_step_result(result: Any) -> EnvironmentReply:
    """Validate the result of `step`. Raises ContractError."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise ContractError(f"step gave {format_value(result)}; give (messages, reward, terminated, truncated, info)")
    messages, reward, terminated, truncated, info = result
    reply = EnvironmentReply(
        messages_of(messages, "step"),
        info_of(info, "step"),
        reward=reward_of(reward, "step"),
        terminated=bool(terminated),
        truncated=bool(truncated),
    )
    if not (reply.messages or reply.terminated or reply.truncated):
        raise ContractError("step said nothing, and the dialogue is not over; say something, or give terminated=True")
    return reply


def check_verdict(result: Any) -> Verdict:
    """Validate the result of `check`, and convert numbers of numpy. Raises ContractError."""
    if not isinstance(result, Verdict):
        raise ContractError(f"check gave {format_value(result)}; give a partita.simulation.Verdict")
    if result.target is not None and not isinstance(result.target, str):
        raise ContractError(f"check gave a target of {format_value(result.target)}; give a text or None")
    return replace(result, ok=truth_of(result.ok, "check"), metrics=metrics_of(result.metrics, "check"))


def check_world_output(episode: Episode, *, first: int) -> None:
    """Check what a world wrote to an episode, with its messages from index `first` on, and convert numbers of numpy.

    Raises:
        ContractError: A message, the gold answer, the reward, the verdict, a metric or the status is invalid.
    """
    messages = episode.messages[first:]
    if not all(isinstance(message, Mapping) and isinstance(message.get("agent"), str) for message in messages):
        raise ContractError("run added messages without an agent; add them with episode.observe(text, agent=...)")
    messages_of(messages, "run")
    if not isinstance(episode.gold, str | None):
        raise ContractError(f"run gave gold of {format_value(episode.gold)}; give a text")
    episode.reward = reward_of(episode.reward, "run")
    episode.metrics = metrics_of(episode.metrics, "run")
    episode.ok = None if episode.ok is None else truth_of(episode.ok, "run")
    if not isinstance(episode.target, str | None):
        raise ContractError(f"run gave a target of {format_value(episode.target)}; give a text or None")
    if not isinstance(episode.rounds, int):
        raise ContractError(f"run gave rounds of {format_value(episode.rounds)}; leave them to a checker")
    if not isinstance(episode.reason, str | None):
        raise ContractError(f"run gave a reason of {format_value(episode.reason)}; give a text or None")
    if episode.status not in (None, "done", "truncated"):
        raise ContractError(
            f"run ended with {format_value(episode.status)}; write done or truncated, or raise what failed"
        )


def reward_of(reward: Any, method: str) -> float | None:
    """Return a reward as a float, or None. Raises ContractError unless it is a finite number or None."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not is_finite(reward):
        raise ContractError(f"{method} gave a reward of {format_value(reward)}; give a number or None")
    return float(reward)


def messages_of(value: Any, method: str) -> list[dict[str, str]]:
    """Convert a text or a list of messages to messages; an empty text gives none. Raises ContractError."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if value else []
    if not isinstance(value, Sequence):
        raise ContractError(f"{method} gave messages of {format_value(value)}; give a text, or a list of messages")
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(content, str):
            raise ContractError(
                f"{method} gave the message {format_value(message)}; give a role ({', '.join(ROLES)}) and a text "
                "as content"
            )
        messages.append({"role": str(role), "content": content})
    return messages


def info_of(info: Any, method: str) -> Mapping[str, Any]:
    """Validate info: a dictionary with an optional `gold` and optional numbers `metrics`.

    `gold` is a text, or a dictionary with the right value of each output, which becomes JSON.

    Raises:
        ContractError: It is something else.
    """
    if not isinstance(info, Mapping):
        raise ContractError(f"{method} gave info of {format_value(info)}; give a dictionary")
    if isinstance(info.get("gold"), Mapping):
        info = {**info, "gold": gold_text(info["gold"], method)}
    if not isinstance(info.get("gold"), str | None):
        raise ContractError(
            f"{method} gave gold of {format_value(info['gold'])}; give a text, or a dictionary of outputs"
        )
    return {**info, "metrics": metrics_of(info.get("metrics", {}), method)}


def gold_text(gold: Mapping[str, Any], method: str) -> str:
    """Return the right values of several outputs as JSON. Raises ContractError."""
    try:
        return compact_json(plain_json(gold))
    except (CellError, RecursionError) as error:
        raise ContractError(f"{method} gave gold of {format_value(gold)}: {error}; give JSON values") from None


def metrics_of(metrics: Any, method: str) -> dict[str, float]:
    """Return metrics as floats by name. Raises ContractError unless they are finite numbers with names of their own."""
    fits = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and is_unicode(name) and (is_bool(value) or is_finite(value))
        for name, value in metrics.items()
    )
    if not fits:
        raise ContractError(f"{method} gave metrics of {format_value(metrics)}; give numbers by name")
    if taken := [name for name in metrics if OWN_METRICS.fullmatch(name)]:
        raise ContractError(
            f"{method} gave the metric {taken[0]}, which partita computes itself (reward and success from the reward "
            "and the verdict); choose another name"
        )
    return {name: float(value) for name, value in metrics.items()}


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite real number, also one of numpy."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def truth_of(value: Any, method: str, *, name: str = "ok") -> bool:
    """Return a bool, also one of numpy. Raises ContractError if it is something else.

    Args:
        value: The value.
        method: What gave it, for the error.
        name: Its name, for the error.
    """
    if not is_bool(value):
        raise ContractError(f"{method} gave {name} of {format_value(value)}; give True or False")
    return bool(value)


def is_bool(value: Any) -> bool:
    """Return whether a value is a bool, also one of numpy, which is not imported for this."""
    return isinstance(value, bool) or f"{type(value).__module__}.{type(value).__name__}" in (
        "numpy.bool",
        "numpy.bool_",
    )


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_value(value: Any) -> str:
    """Return the repr of a value, cut to 80 characters."""
    return shortened(repr(value), 80)
