"""Worlds, and what has and keeps their dialogues, as a user would write them; some tasks make them misbehave."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partita.simulation import Ask, Dialogue, Play, Rollout, Transcripts

CLOSED: list[str] = []
"""Dialogues whose world was left."""


class Panel:
    """A guest asks the agent, a judge hears both and says a word, and so on; the task says how often."""

    def __init__(self, rounds: int = 3) -> None:
        self.rounds = rounds

    def play(self, dialogue: Dialogue) -> Play:
        dialogue.hear("be what you are", seat="system")
        dialogue.hear(f"say {dialogue.task['number']}", seat="host")
        try:
            for _ in range(self.rounds):
                before = len(dialogue.messages)
                yield Ask("guest")
                if len(dialogue.messages) == before:
                    return  # it has no more to say
                yield Ask()
                yield Ask("judge")
                dialogue.add_reward(0.25)
            dialogue.metrics["rounds"] = self.rounds
        finally:
            CLOSED.append(dialogue.key)


class Quiz:
    """Asks for the number, and knows the right answer."""

    def play(self, dialogue: Dialogue) -> Play:
        for turn in range(3):
            dialogue.hear(f"say {turn}")
            dialogue.gold = "one two"
            yield Ask()
        dialogue.end("truncated", "bell")


class Endless:
    """Never ends by itself."""

    def play(self, dialogue: Dialogue) -> Play:
        dialogue.hear("say more")
        while True:
            yield Ask()
            dialogue.hear("once more")


class Grudging:
    """Cannot be left in peace."""

    def play(self, dialogue: Dialogue) -> Play:
        dialogue.hear("say more")
        try:
            while True:
                yield Ask()
        finally:
            raise OSError("the door is stuck")


class Vain:
    """Calls a dialogue a success, however it ended."""

    def play(self, dialogue: Dialogue) -> Play:
        dialogue.hear("say more")
        try:
            for _ in range(2):
                yield Ask("guest")
                yield Ask()
        finally:
            dialogue.end("done")
            dialogue.add_reward(1.0)


class Garbage:
    """Leaves in dialogues what cannot be kept."""

    def play(self, dialogue: Dialogue) -> Any:
        dialogue.hear("say more")
        yield Ask()
        number = dialogue.task["number"]
        if number == 0:
            yield
        if number == 1:
            dialogue.hear([{"role": "user", "content": 5}])
        if number == 2:
            dialogue.messages.append({"role": "user", "content": "more"})
        if number == 3:
            dialogue.metrics["length"] = object()  # type: ignore[assignment]
        if number == 4:
            dialogue.add_reward(float("nan"))
        if number == 7:
            dialogue.metrics["length"] = float("inf")
        if number == 5:
            dialogue.end("finished")  # type: ignore[arg-type]
        if number == 6:
            dialogue.gold = 7  # type: ignore[assignment]
        yield Ask()


class Broken:
    """Misbehaves in some dialogues."""

    def play(self, dialogue: Dialogue) -> Any:
        if dialogue.task["number"] == 5:
            return None
        return self.talk(dialogue)

    def talk(self, dialogue: Dialogue) -> Iterator[Any]:
        number = dialogue.task["number"]
        dialogue.hear(f"say {number}")
        yield Ask()
        if number == 1:
            raise OSError("nobody is in")
        if number == 2:
            yield "agent"
        if number == 3:
            yield Ask("gest")
        if number == 4:
            time.sleep(60)
        if number == 6:
            raise SystemExit(3)
        yield Ask()


class Mute:
    """No world."""


class Backwards(Rollout):
    """Begins with the last dialogue."""

    def have(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        yield from super().have(iter(list(dialogues)[::-1]))


class Told(Transcripts):
    """Tells each dialogue elsewhere too."""

    def add(self, dialogue: Dialogue) -> None:
        super().add(dialogue)
        with Path(os.environ["TOLD"]).open("a", encoding="utf8") as file:
            file.write(json.dumps([dialogue.key, dialogue.status]) + "\n")
