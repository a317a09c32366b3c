"""Environments, worlds, agents and checkers for dialogues."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from partita.simulation import Episode, Play, RequestTurn, Rollout, Transcripts, TurnContext, Verdict


class Desk:
    """An environment with two messages that knows the correct answers; with half of the seeds it accepts any answer."""

    def __init__(self, word: str = "say", pause: float = 0.0, breaks: bool = False) -> None:
        self.word, self.pause, self.breaks = word, pause, breaks

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.turns, self.gold, self.lucky = 0, "red ball", seed % 2
        place = "one" if "pytest" in sys.modules else "two"  # in the process of the test, or in a separate one
        return f"{self.word} red {place}", {"gold": self.gold}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        time.sleep(self.pause)
        if self.breaks:
            raise OSError("closed")
        self.turns += 1
        if self.turns == 2:
            return "", float(self.lucky or action.strip() == self.gold), True, False, {}
        self.gold = "blue box"
        return "say more", None, False, False, {"gold": self.gold}

    def close(self) -> None:
        """Do nothing."""


class OtherDesk(Desk):
    """An environment with other messages."""

    def __init__(self) -> None:
        super().__init__(word="blue")


class Counter:
    """An environment with a tool."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> str:
        return "say three"

    def add(self, one: int) -> int:
        """Add one.

        Args:
            one: A number.
        """
        return one + 1


class Panel:
    """A world in which all agents speak in turn."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds

    def run(self, episode: Episode) -> Play:
        episode.observe("say more")
        for _ in range(self.rounds):
            for agent in ("user", "partner", "guest"):
                yield RequestTurn(agent)
            yield RequestTurn()


class OtherPanel(Panel):
    """A world with twice as many turns."""

    def __init__(self) -> None:
        super().__init__(2)


class Speaker:
    """An agent that says a word."""

    def __init__(self, word: str = "green") -> None:
        self.word = word

    def reply(self, context: TurnContext) -> str:
        return self.word


class OtherSpeaker(Speaker):
    """An agent that says another word."""

    def __init__(self) -> None:
        super().__init__("three")


class Strict:
    """A checker that finds every dialogue wrong."""

    def __init__(self, word: str = "two") -> None:
        self.word = word

    def check(self, episode: Episode) -> Verdict:
        return Verdict(False, feedback=f"say {self.word}", target=self.word)


class Watched(Rollout):
    """A rollout that records which dialogues it starts."""

    def run(self, episodes: Iterator[Episode]) -> Iterator[Episode]:
        started = list(episodes)
        note(dialogue.key for dialogue in started)
        yield from super().run(iter(started))


class NotedTranscripts(Transcripts):
    """Transcripts that also write the key of each dialogue to another file."""

    def add(self, episode: Episode) -> None:
        super().add(episode)
        note([episode.key])


def note(keys: Iterable[str]) -> None:
    """Write the keys of episodes to a file."""
    with Path("noted.txt").open("a", encoding="utf8") as file:
        file.writelines(f"{key}\n" for key in keys)
