"""Who says what when. A world plays one dialogue: it yields whenever a seat is to speak, and finds its words there."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from partita.simulation.closing import Closing
from partita.simulation.contract import (
    Checker,
    Environment,
    GarbageError,
    TooSlowError,
    Verdict,
    answered,
    check_played,
    described,
    judged,
    messages_of,
    opened,
    shown,
)
from partita.simulation.dialogue import AGENT, Dialogue


@dataclass(frozen=True)
class Ask:
    """It is a seat's turn to speak."""

    seat: str = AGENT


Play = Generator[Ask, None, None]
"""Yields whose turn it is; goes on when what was said stands in the dialogue, or where that seat has no more to say."""


class World(Protocol):
    """Plays dialogues."""

    def play(self, dialogue: Dialogue) -> Play:
        """From the first word to the end, which it notes in the dialogue. What it raises is a failure."""


class EnvironmentWorld:
    """A program answers the model."""

    def __init__(self, make: Callable[[], Environment], *, max_turns: int, closing: Closing) -> None:
        """`make` gives a new environment for each dialogue."""
        self.make, self.max_turns, self.closing = make, max_turns, closing

    def play(self, dialogue: Dialogue) -> Play:
        """Reset, and step until the environment or the limit ends it."""
        environment = self.make()
        try:
            said = opened(environment.reset(seed=dialogue.seed, task=dialogue.task))
            dialogue.hear(said.messages, gold=said.info.get("gold"))
            while True:
                yield Ask()
                said = answered(environment.step(dialogue.replies[-1].text))
                dialogue.add_reward(said.reward)
                dialogue.metrics |= said.info.get("metrics", {})
                if said.terminated or said.truncated:
                    dialogue.hear(said.messages)
                    dialogue.end(*(("done",) if said.terminated else ("truncated", "environment")))
                    return
                dialogue.hear(said.messages, gold=said.info.get("gold"))
                if len(dialogue.replies) >= self.max_turns:
                    dialogue.end("truncated", "turns")
                    return
        finally:
            self.closing.begin(environment.close)


class ReplayWorld:
    """What others said in a dialogue of a data set is said again."""

    def __init__(self, *, max_turns: int) -> None:
        self.max_turns = max_turns

    def play(self, dialogue: Dialogue) -> Play:
        """All messages in order; where the model's own would stand, it answers."""
        for message in dialogue.task["messages"]:
            if not message.get("learned"):
                dialogue.hear([message])
                continue
            if len(dialogue.replies) >= self.max_turns:
                dialogue.end("truncated", "turns")
                return
            dialogue.gold = message["content"]
            yield Ask()
        dialogue.end("done")


END = object()
"""What a generator that has ended gives."""


class WorldError(Exception):
    """A world of the user's has raised; why stands as its cause."""


class CustomWorld:
    """A world of the user's, held to its contract: it asks seats that are there, and the agent not too often."""

    def __init__(self, world: World, seats: Collection[str], *, max_turns: int) -> None:
        self.world, self.seats, self.max_turns = world, seats, max_turns

    def play(self, dialogue: Dialogue) -> Play:
        """The user's dialogue; it is done where the user has not said how it ended. Raises WorldError."""
        play = self.begun(dialogue)
        try:
            while (ask := self.next_ask(play, dialogue)) is not None and dialogue.status is None:
                if ask.seat == AGENT and len(dialogue.replies) >= self.max_turns:
                    self.leave(play)  # what it does at its end is done before
                    dialogue.end("truncated", "turns")
                    return
                yield ask
            if dialogue.status is None:
                dialogue.end("done")
        finally:
            self.leave(play)

    def leave(self, play: Play) -> None:
        """Let the user's generator close what it holds. Raises WorldError."""
        try:
            play.close()
        except (Exception, SystemExit) as error:
            raise WorldError from error

    def begun(self, dialogue: Dialogue) -> Play:
        """The user's generator."""
        try:
            play = self.world.play(dialogue)
            if not isinstance(play, Generator):
                raise GarbageError(f"play gave {shown(play)}; write it with yield")
        except (Exception, SystemExit) as error:
            raise WorldError from error
        return play

    def next_ask(self, play: Play, dialogue: Dialogue) -> Ask | None:
        """Whose turn it is; None at the end. What it leaves in the dialogue is looked at."""
        before = len(dialogue.messages)
        try:
            ask: Any = next(play, END)
            check_played(dialogue, first=before)
            if ask is END:
                return None
            if not isinstance(ask, Ask):
                raise GarbageError(f"play gave {shown(ask)}; yield partita.simulation.Ask(), with a seat's name in it")
            if ask.seat not in self.seats:
                raise GarbageError(f"play asks {shown(ask.seat)}; the seats of the file are {', '.join(self.seats)}")
        except GarbageError as error:
            del dialogue.messages[before:]
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

    def play(self, dialogue: Dialogue) -> Play:
        """The other world's dialogue, its verdict, and a further answer as often as the rounds allow."""
        yield from self.world.play(dialogue)
        verdict = self.verdict(dialogue)
        while not verdict.ok and verdict.feedback and dialogue.rounds < self.rounds and dialogue.status == "done":
            dialogue.status = None
            dialogue.rounds += 1
            dialogue.hear(messages_of(verdict.feedback, "check"), seat="checker", gold=verdict.target)
            yield Ask()
            dialogue.end("done")
            verdict = self.verdict(dialogue)
        dialogue.ok, dialogue.target = verdict.ok, verdict.target
        dialogue.metrics |= verdict.metrics

    def verdict(self, dialogue: Dialogue) -> Verdict:
        """What the checker finds. Raises CheckerError."""
        try:
            return judged(self.checker.check(dialogue))
        except Exception as error:
            raise CheckerError from error


def failure(error: BaseException) -> str:
    """What is noted of a dialogue in which something from outside raised."""
    where, cause = "environment", error
    if isinstance(error, CheckerError | WorldError) and error.__cause__ is not None:
        where, cause = ("checker" if isinstance(error, CheckerError) else "world"), error.__cause__
    return f"timeout: {cause}" if isinstance(cause, TooSlowError) else f"{where}: {described(cause)}"
