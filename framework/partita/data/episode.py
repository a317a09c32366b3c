"""One dialogue: what was said, what it came to, and its line in the transcripts."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["done", "truncated", "failed"]
"""done: it came to its end. truncated: it reached a limit. failed: something in it raised, and it has no reward."""

AGENT = "agent"
"""The agent of the model that a simulation is about."""
TO_AGENT = ("system", "checker")
"""Agents that speak to the agent alone."""


@dataclass
class EpisodeTurn:
    """An answer of the model."""

    place: int
    """Its place among the messages."""
    text: str
    tokens: tuple[int, ...]
    gold: str | None
    """The right answer, where it is known."""

    @property
    def exact(self) -> bool | None:
        """Whether it is the right answer; None where that is not known."""
        return None if self.gold is None else self.text.strip() == self.gold.strip()


@dataclass
class Episode:
    """One dialogue about one task."""

    key: str
    """Names the dialogue, the same in every run: the task, and which of its repeats."""
    task_key: str
    """Names the task."""
    task: Mapping[str, Any]
    seed: int
    """What its environment follows from."""
    shows_gold: bool = False
    """Whether the model sees the right answers of turns before, and not its own."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All that was really said, in order: `role`, `content`, the `agent` that said it, and `learned` where it was the
    model. Roles are as the agent sees them: who talks to it is the user."""
    replies: list[EpisodeTurn] = field(default_factory=list)
    """Answers of the agent."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """What models in other agents said, as tokens, by its place among the messages."""
    gold: str | None = None
    """The right answer to what was said last, where it is known."""
    reward: float | None = None
    """Sum of the rewards; None where there was none."""
    metrics: dict[str, float] = field(default_factory=dict)
    ok: bool | None = None
    """What the checker said last; None without one."""
    target: str | None = None
    """What the last answer should have been, where the checker knows."""
    rounds: int = 0
    """How often the checker has sent it back."""
    status: Status | None = None
    """None while it goes on."""
    reason: str | None = None
    """Which limit, or what failed and how."""

    def observe(
        self, messages: str | Iterable[Mapping[str, Any]], *, agent: str = "user", gold: str | None = None
    ) -> None:
        """Somebody else says something, a text or messages with `role` and `content`, and what is right to answer."""
        if isinstance(messages, str):
            messages = [{"role": "system" if agent == "system" else "user", "content": messages}]
        self.messages += [
            {"role": message["role"], "content": message["content"], "agent": agent} for message in messages
        ]
        self.gold = gold

    def act_as(self, agent: str, text: str, tokens: tuple[int, ...] | None) -> None:
        """Another agent speaks; a model in tokens."""
        if tokens is not None:
            self.tokens[len(self.messages)] = tokens
        self.observe([{"role": "user", "content": text}], agent=agent)

    def act(self, text: str, tokens: tuple[int, ...]) -> None:
        """The model answers. Raises ValueError where the right answer is to be shown and not known."""
        if self.shows_gold and self.gold is None:
            raise ValueError(
                "history: gold needs the right answer of each turn: info['gold'], or dialogue.gold of a world"
            )
        self.replies.append(EpisodeTurn(len(self.messages), text, tokens, self.gold))
        self.gold = None
        self.messages.append({"role": "assistant", "content": text, "agent": AGENT, "learned": True})

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """Tokens of what a model said last."""
        last = len(self.messages) - 1
        return self.tokens[last] if last in self.tokens else self.replies[-1].tokens

    def turns_of(self, agent: str) -> int:
        """How often an agent has spoken."""
        if agent == AGENT:
            return len(self.replies)
        return sum(message["agent"] == agent for message in self.messages)

    def seen_by(self, agent: str) -> list[dict[str, Any]]:
        """What an agent sees: to itself it is the assistant, and all others are the user."""
        if agent == AGENT:
            return self.shown
        return [
            {"role": "assistant", "content": message["content"], "learned": True}
            if message["agent"] == agent
            else {"role": "user", "content": message["content"]}
            for message in self.messages
            if message["agent"] not in TO_AGENT
        ]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """What the model sees: all that was said, with the right answers in place of its own where those are shown."""
        if not self.shows_gold:
            return self.messages
        right = {reply.place: reply.gold for reply in self.replies}
        return [
            message | {"content": right[place]} if place in right else message
            for place, message in enumerate(self.messages)
        ]

    def add_reward(self, reward: float | None) -> None:
        """A reward for the last answer."""
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward

    def end(self, status: Status, reason: str | None = None) -> None:
        """Nothing is said any more."""
        self.status, self.reason = status, reason
        if status == "failed":
            self.reward, self.ok, self.metrics = None, None, {}

    @property
    def succeeded(self) -> bool | None:
        """Whether it came to what it should: by the checker, else by a reward of at least 1, else by all answers.

        None where nobody knows; a dialogue that failed did not.
        """
        if self.status == "failed":
            return False
        if self.ok is not None:
            return self.ok
        if self.reward is not None:
            return self.reward >= 1
        exact = [reply.exact for reply in self.replies]
        return all(exact) if exact and None not in exact else None

    def line(self) -> dict[str, Any]:
        """Its line in the transcripts, which reads as a row of `messages`."""
        answers = {reply.place: reply for reply in self.replies}
        tokens = self.tokens | {place: reply.tokens for place, reply in answers.items()}
        return {
            "dialogue": self.key,
            "task": self.task_key,
            "seed": self.seed,
            "status": self.status,
            "reason": self.reason,
            "reward": self.reward,
            "ok": self.ok,
            "rounds": self.rounds,
            "metrics": self.metrics,
            "target": self.target,
            "messages": [
                {"role": message["role"], "content": message["content"], "agent": message["agent"]}
                | ({"tokens": list(tokens[place])} if place in tokens else {})
                | ({"gold": answers[place].gold} if place in answers and answers[place].gold is not None else {})
                for place, message in enumerate(self.messages)
            ],
        }


def derived_seed(seed: int, *names: str) -> int:
    """A seed that follows from another one and from names, 0 to 2**32 - 1."""
    text = "\0".join((str(seed), *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")


def from_line(line: Mapping[str, Any]) -> Episode:
    """The dialogue of a line, with all that metrics look at."""
    found = Episode(line["dialogue"], line["task"], {}, line["seed"])
    for place, message in enumerate(line["messages"]):
        agent = message.get("agent", AGENT if "tokens" in message else "user")
        found.messages.append({"role": message["role"], "content": message["content"], "agent": agent})
        if "tokens" in message and agent != AGENT:
            found.tokens[place] = tuple(message["tokens"])
        elif "tokens" in message:
            found.replies.append(EpisodeTurn(place, message["content"], tuple(message["tokens"]), message.get("gold")))
    found.reward, found.ok, found.rounds = line["reward"], line["ok"], line["rounds"]
    found.metrics, found.target = dict(line["metrics"]), line["target"]
    found.status, found.reason = line["status"], line["reason"]
    return found
