"""What a program from outside has to do to be talked to, or to check a dialogue.

An environment has the shape of Gymnasium's (Towers et al. 2024), with messages in place of observations and a text in
place of an action. One instance serves one dialogue. What it does must follow from the seed of `reset` and from the
answers alone: then a dialogue is the same whatever stands beside it, and wherever it is had.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.data.episode import Episode

Message = Mapping[str, Any]
"""`role` (system, user, assistant or tool) and `content`."""

ROLES = ("system", "user", "assistant", "tool")


class Environment(Protocol):
    """Somebody whom the model talks to. Messages may be a text as well, which the user says.

    `info` may hold `gold`, the right answer to what was said last, and `metrics`, numbers by name.
    """

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> "tuple[str | Sequence[Message], Mapping[str, Any]]":
        """Begin a dialogue about a task: what is said first, and info."""

    def step(self, action: str) -> "tuple[str | Sequence[Message], float | None, bool, bool, Mapping[str, Any]]":
        """Hear the model's answer: what is said to it, a reward or None, terminated, truncated, info."""

    def close(self) -> None:
        """The dialogue is over."""


@dataclass(frozen=True)
class Verdict:
    """What a checker finds."""

    ok: bool
    """Whether the dialogue came to what it should."""
    feedback: str | Sequence[Message] = ()
    """What is said to the model where it may try again; nothing where that is of no use."""
    target: str | None = None
    """What the model's last answer should have been, where that is known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name."""


class Checker(Protocol):
    """Looks at a dialogue at its end."""

    def check(self, episode: Episode) -> Verdict:
        """What it came to. Only `task` and `messages` of the dialogue are to be looked at, and nothing changed."""


class ContractError(Exception):
    """Something from outside does not keep its contract."""


class StepTimeoutError(Exception):
    """Something from outside takes too long; made with the seconds that it has."""

    def __str__(self) -> str:
        return f"no answer within {self.args[0]:g} s (limits.step_seconds)"


def described(error: BaseException) -> str:
    """What something from outside has raised, for people."""
    return str(error) if isinstance(error, ContractError) else f"{type(error).__name__}: {error}"


class UnfitError(ContractError):
    """A program does not have the interface that the file says."""


@dataclass(frozen=True)
class EnvironmentReply:
    """What an environment has said."""

    messages: Sequence[Message]
    info: Mapping[str, Any]
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False


def opened(found: Any) -> EnvironmentReply:
    """What `reset` gave. Raises ContractError."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ContractError(f"reset gave {shown(found)}; give (messages, info)")
    messages, info = found
    return EnvironmentReply(messages_of(messages, "reset"), info_of(info, "reset"))


def answered(found: Any) -> EnvironmentReply:
    """What `step` gave. Raises ContractError."""
    if not isinstance(found, tuple) or len(found) != 5:
        raise ContractError(f"step gave {shown(found)}; give (messages, reward, terminated, truncated, info)")
    messages, reward, terminated, truncated, info = found
    said = EnvironmentReply(
        messages_of(messages, "step"),
        info_of(info, "step"),
        reward=reward_of(reward, "step"),
        terminated=bool(terminated),
        truncated=bool(truncated),
    )
    if not (said.messages or said.terminated or said.truncated):
        raise ContractError("step said nothing, and the dialogue is not over; say something, or give terminated=True")
    return said


def judged(found: Any) -> Verdict:
    """What `check` gave. Raises ContractError."""
    if not isinstance(found, Verdict):
        raise ContractError(f"check gave {shown(found)}; give a partita.simulation.Verdict")
    metrics_of(found.metrics, "check")
    if found.target is not None and not isinstance(found.target, str):
        raise ContractError(f"check gave a target of {shown(found.target)}; give a text or None")
    return found


def check_played(episode: Episode, *, first: int) -> None:
    """Raises ContractError unless a world has left a dialogue as it should; messages from `first` on are looked at."""
    heard = episode.messages[first:]
    fit = all(isinstance(message, Mapping) and isinstance(message.get("agent"), str) for message in heard)
    if not fit:
        raise ContractError("run added messages without an agent; say them with dialogue.observe(text, agent=...)")
    messages_of(heard, "run")
    if not isinstance(episode.gold, str | None):
        raise ContractError(f"run gave gold of {shown(episode.gold)}; give a text")
    reward_of(episode.reward, "run")
    metrics_of(episode.metrics, "run")
    if episode.status not in (None, "done", "truncated"):
        raise ContractError(f"run ended with {shown(episode.status)}; write done or truncated, or raise what failed")


def reward_of(reward: Any, method: str) -> float | None:
    """A reward that is a number, or None. Raises ContractError."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ContractError(f"{method} gave a reward of {shown(reward)}; give a number or None")
    return float(reward)


def messages_of(given: Any, method: str) -> list[dict[str, str]]:
    """Messages of a text or of a list of messages; none of an empty text. Raises ContractError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    if not isinstance(given, Sequence):
        raise ContractError(f"{method} gave messages of {shown(given)}; give a text, or a list of messages")
    found = []
    for message in given:
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(content, str):
            raise ContractError(
                f"{method} gave the message {shown(message)}; give a role ({', '.join(ROLES)}) and a text as content"
            )
        found.append({"role": str(role), "content": content})
    return found


def info_of(info: Any, method: str) -> Mapping[str, Any]:
    """Info that is a dictionary, with gold as a text and metrics as numbers. Raises ContractError."""
    if not isinstance(info, Mapping):
        raise ContractError(f"{method} gave info of {shown(info)}; give a dictionary")
    if not isinstance(info.get("gold"), str | None):
        raise ContractError(f"{method} gave gold of {shown(info['gold'])}; give a text")
    metrics_of(info.get("metrics", {}), method)
    return info


def metrics_of(metrics: Any, method: str) -> None:
    """Raises ContractError unless these are numbers by name."""
    fits = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in metrics.items()
    )
    if not fits:
        raise ContractError(f"{method} gave metrics of {shown(metrics)}; give numbers by name")


def shown(value: Any) -> str:
    """A value for people, not too long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
