"""Who says what when. A world plays one dialogue: it yields whenever an agent is to speak, and finds its words
there."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from partita.data.episode import AGENT, Episode
from partita.simulation.closing import Closing
from partita.simulation.contract import (
    Checker,
    ContractError,
    Environment,
    StepTimeoutError,
    Verdict,
    answered,
    check_played,
    described,
    judged,
    messages_of,
    opened,
    shown,
)


@dataclass(frozen=True)
class RequestTurn:
    """It is an agent's turn to speak."""

    agent: str = AGENT


Play = Generator[RequestTurn, None, None]
"""Yields whose turn it is; goes on when what was said stands in the dialogue, or where that agent has no more to
say."""


class World(Protocol):
    """Plays dialogues."""

    def run(self, episode: Episode) -> Play:
        """From the first word to the end, which it notes in the dialogue. What it raises is a failure."""


class EnvironmentWorld:
    """A program answers the model."""

    def __init__(self, make: Callable[[], Environment], *, max_turns: int, closing: Closing) -> None:
        """`make` gives a new environment for each dialogue."""
        self.make, self.max_turns, self.closing = make, max_turns, closing

    def run(self, episode: Episode) -> Play:
        """Reset, and step until the environment or the limit ends it."""
        environment = self.make()
        try:
            said = opened(environment.reset(seed=episode.seed, task=episode.task))
            episode.observe(said.messages, gold=said.info.get("gold"))
            while True:
                yield RequestTurn()
                said = answered(environment.step(episode.replies[-1].text))
                episode.add_reward(said.reward)
                episode.metrics |= said.info.get("metrics", {})
                if said.terminated or said.truncated:
                    episode.observe(said.messages)
                    episode.end(*(("done",) if said.terminated else ("truncated", "environment")))
                    return
                episode.observe(said.messages, gold=said.info.get("gold"))
                if len(episode.replies) >= self.max_turns:
                    episode.end("truncated", "turns")
                    return
        finally:
            self.closing.begin(environment.close)


class ReplayWorld:
    """What others said in a dialogue of a data set is said again."""

    def __init__(self, *, max_turns: int) -> None:
        self.max_turns = max_turns

    def run(self, episode: Episode) -> Play:
        """All messages in order; where the model's own would stand, it answers."""
        for message in episode.task["messages"]:
            if not message.get("learned"):
                episode.observe([message])
                continue
            if len(episode.replies) >= self.max_turns:
                episode.end("truncated", "turns")
                return
            episode.gold = message["content"]
            yield RequestTurn()
        episode.end("done")


END = object()
"""What a generator that has ended gives."""


class WorldError(Exception):
    """A world of the user's has raised; why stands as its cause."""


class CustomWorld:
    """A world of the user's, held to its contract: it asks agents that are there, and the agent not too often."""

    def __init__(self, world: World, agents: Collection[str], *, max_turns: int) -> None:
        self.world, self.agents, self.max_turns = world, agents, max_turns

    def run(self, episode: Episode) -> Play:
        """The user's dialogue; it is done where the user has not said how it ended. Raises WorldError."""
        play = self.begun(episode)
        try:
            while (ask := self.next_ask(play, episode)) is not None and episode.status is None:
                if ask.agent == AGENT and len(episode.replies) >= self.max_turns:
                    self.leave(play)  # what it does at its end is done before
                    episode.end("truncated", "turns")
                    return
                yield ask
            if episode.status is None:
                episode.end("done")
        finally:
            self.leave(play)

    def leave(self, play: Play) -> None:
        """Let the user's generator close what it holds. Raises WorldError."""
        try:
            play.close()
        except (Exception, SystemExit) as error:
            raise WorldError from error

    def begun(self, episode: Episode) -> Play:
        """The user's generator."""
        try:
            play = self.world.run(episode)
            if not isinstance(play, Generator):
                raise ContractError(f"run gave {shown(play)}; write it with yield")
        except (Exception, SystemExit) as error:
            raise WorldError from error
        return play

    def next_ask(self, play: Play, episode: Episode) -> RequestTurn | None:
        """Whose turn it is; None at the end. What it leaves in the dialogue is looked at."""
        before = len(episode.messages)
        try:
            ask: Any = next(play, END)
            check_played(episode, first=before)
            if ask is END:
                return None
            if not isinstance(ask, RequestTurn):
                raise ContractError(
                    f"run gave {shown(ask)}; yield partita.simulation.RequestTurn(), with an agent's name in it"
                )
            if ask.agent not in self.agents:
                raise ContractError(f"run asks {shown(ask.agent)}; the agents of the file are {', '.join(self.agents)}")
        except ContractError as error:
            del episode.messages[before:]
            raise WorldError from error
        except (Exception, SystemExit) as error:
            raise WorldError from error
        return ask


class CheckerError(Exception):
    """A checker has raised; why stands as its cause."""


class CheckedWorld:
    """Another world, at whose end a checker looks at the dialogue and may send it back."""

    def __init__(self, world: World, checker: Checker, *, rounds: int) -> None:
        self.world, self.checker, self.rounds = world, checker, rounds

    def run(self, episode: Episode) -> Play:
        """The other world's dialogue, its verdict, and a further answer as often as the rounds allow."""
        yield from self.world.run(episode)
        verdict = self.verdict(episode)
        while not verdict.ok and verdict.feedback and episode.rounds < self.rounds and episode.status == "done":
            episode.status = None
            episode.rounds += 1
            episode.observe(messages_of(verdict.feedback, "check"), agent="checker", gold=verdict.target)
            yield RequestTurn()
            episode.end("done")
            verdict = self.verdict(episode)
        episode.ok, episode.target = verdict.ok, verdict.target
        episode.metrics |= verdict.metrics

    def verdict(self, episode: Episode) -> Verdict:
        """What the checker finds. Raises CheckerError."""
        try:
            return judged(self.checker.check(episode))
        except Exception as error:
            raise CheckerError from error


def failure(error: BaseException) -> str:
    """What is noted of a dialogue in which something from outside raised."""
    where, cause = "environment", error
    if isinstance(error, CheckerError | WorldError) and error.__cause__ is not None:
        where, cause = ("checker" if isinstance(error, CheckerError) else "world"), error.__cause__
    return f"timeout: {cause}" if isinstance(cause, StepTimeoutError) else f"{where}: {described(cause)}"
