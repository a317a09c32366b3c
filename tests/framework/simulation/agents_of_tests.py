"""Scripted agents for the tests of dialogues; they misbehave in some tasks."""

import asyncio
import random
import time
from collections.abc import Sequence

from partita.simulation import Episode, Verdict
from partita.simulation.agents import TurnContext

WORDS = ("red", "green", "blue", "one", "two", "three", "ball", "box")


def said(context: TurnContext) -> str | None:
    """Return two words that depend on the last message, two to four times; then None."""
    rng = random.Random(context.seed)
    if context.turn >= 2 + context.task["number"] % 3:
        return None
    heard = context.messages[-1]["content"] if context.messages else ""
    return f"say {rng.choice(WORDS)} {sum(map(ord, heard)) % 7}"


class Crowd:
    """An agent that answers in many dialogues at once."""

    def __init__(self, misbehaves: bool = False, seconds: float = 60.0) -> None:
        self.misbehaves, self.seconds = misbehaves, seconds

    def act(self, contexts: Sequence[TurnContext]) -> list[str | None]:
        numbers = [context.task["number"] for context in contexts if context.turn == 1]
        if self.misbehaves and 3 in numbers:
            raise OSError("nobody is in")
        if self.misbehaves and 23 in numbers:
            time.sleep(self.seconds)
        replies: list[str | None] = [said(context) for context in contexts]
        return [*replies, "more"] if self.misbehaves and 13 in numbers else replies


class Cancelled:
    """An agent whose call is cancelled."""

    def reply(self, context: TurnContext) -> str | None:
        raise asyncio.CancelledError


class Single:
    """An agent that answers in one dialogue at a time."""

    def reply(self, context: TurnContext) -> str | None:
        return said(context)


class Silent:
    """A class without the methods of an agent."""


class CancelledChecker:
    """A checker whose call is cancelled."""

    def check(self, episode: Episode) -> Verdict:
        raise asyncio.CancelledError("no more checks")


class Strict:
    """A checker that finds every dialogue wrong, and gives a target for the last answer."""

    def check(self, episode: Episode) -> Verdict:
        return Verdict(False, target="two")
