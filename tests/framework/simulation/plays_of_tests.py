"""Custom worlds, rollouts and transcripts, as a user would write them; they misbehave in some tasks."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita.simulation import Episode, Play, RequestTurn, Rollout, Transcripts

CLOSED: list[str] = []
"""Keys of the dialogues whose world was closed."""


class Panel:
    """A guest asks the agent, and a judge comments on both; repeated up to `rounds` times."""

    def __init__(self, rounds: int = 3) -> None:
        self.rounds = rounds

    def run(self, episode: Episode) -> Play:
        episode.observe("be what you are", agent="system")
        episode.observe(f"say {episode.task['number']}", agent="host")
        try:
            for _ in range(self.rounds):
                before = len(episode.messages)
                yield RequestTurn("guest")
                if len(episode.messages) == before:
                    return  # the guest has nothing more to say
                yield RequestTurn()
                yield RequestTurn("judge")
                episode.add_reward(0.25)
            episode.metrics["asked"] = self.rounds
        finally:
            CLOSED.append(episode.key)


class Quiz:
    """A world that asks for a number and knows the correct answer."""

    def run(self, episode: Episode) -> Play:
        for turn in range(3):
            episode.observe(f"say {turn}")
            episode.gold = "one two"
            yield RequestTurn()
        episode.end("truncated", "bell")


class Endless:
    """A world that never ends."""

    def run(self, episode: Episode) -> Play:
        episode.observe("say more")
        while True:
            yield RequestTurn()
            episode.observe("once more")


class Grudging:
    """A world that raises when it is closed."""

    def run(self, episode: Episode) -> Play:
        episode.observe("say more")
        try:
            while True:
                yield RequestTurn()
        finally:
            raise OSError("the door is stuck")


class Vain:
    """A world that marks every dialogue as a success when it is closed."""

    def run(self, episode: Episode) -> Play:
        episode.observe("say more")
        try:
            for _ in range(2):
                yield RequestTurn("guest")
                yield RequestTurn()
        finally:
            episode.end("done")
            episode.add_reward(1.0)


class Garbage:
    """A world that writes invalid values into dialogues."""

    def run(self, episode: Episode) -> Any:
        episode.observe("say more")
        yield RequestTurn()
        number = episode.task["number"]
        if number == 0:
            yield
        if number == 1:
            episode.observe([{"role": "user", "content": 5}])
        if number == 2:
            episode.messages.append({"role": "user", "content": "more"})
        if number == 3:
            episode.metrics["length"] = object()  # type: ignore[assignment]
        if number == 4:
            episode.add_reward(float("nan"))
        if number == 7:
            episode.metrics["length"] = float("inf")
        if number == 5:
            episode.end("finished")  # type: ignore[arg-type]
        if number == 6:
            episode.gold = 7  # type: ignore[assignment]
        if number == 9:
            episode.ok = "no"  # type: ignore[assignment]
        if number == 10:
            episode.rounds = object()  # type: ignore[assignment]
        if number == 11:
            episode.target = object()  # type: ignore[assignment]
        if number == 12:
            episode.end("done", 5)  # type: ignore[arg-type]
        yield RequestTurn()


class Broken:
    """A world that misbehaves in some dialogues."""

    def run(self, episode: Episode) -> Any:
        if episode.task["number"] == 5:
            return None
        return self.talk(episode)

    def talk(self, episode: Episode) -> Iterator[Any]:
        number = episode.task["number"]
        episode.observe(f"say {number}")
        yield RequestTurn()
        if number == 1:
            raise OSError("nobody is in")
        if number == 2:
            yield "agent"
        if number == 3:
            yield RequestTurn("gest")
        if number == 4:
            time.sleep(60)
        if number == 6:
            raise SystemExit(3)
        yield RequestTurn()


class Cancelling:
    """A world that raises what is no `Exception`."""

    def run(self, episode: Episode) -> Play:
        episode.observe("say more")
        yield RequestTurn()
        raise (asyncio.CancelledError, KeyboardInterrupt)[episode.task["number"] % 2]


class Mute:
    """A class without the methods of a world."""


class Backwards(Rollout):
    """A rollout that starts with the last dialogue."""

    def run(self, episodes: Iterator[Episode]) -> Iterator[Episode]:
        yield from super().run(iter(list(episodes)[::-1]))


class NotedTranscripts(Transcripts):
    """Transcripts that also write each dialogue to another file."""

    def add(self, episode: Episode) -> None:
        super().add(episode)
        with Path(os.environ["NOTED"]).open("a", encoding="utf8") as file:
            file.write(json.dumps([episode.key, episode.status]) + "\n")
