"""Environments for tests of dialogues; the number of a task decides whether they misbehave."""

import asyncio
import ctypes
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.simulation import Verdict

WORDS = ("red", "green", "blue", "one", "two", "three", "ball", "box")


class Echo:
    """An environment that asks for words two to four times; each question depends on the last answer."""

    def __init__(self, misbehaves: bool = False, seconds: float = 60.0, pause: float = 0.0) -> None:
        self.misbehaves, self.seconds, self.pause = misbehaves, seconds, pause
        self.misdeed = ""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.rng = random.Random(seed)
        self.turns = self.rng.randint(2, 4)
        number = task["number"]
        if self.misbehaves and number % 20 == 3:
            self.misdeed = ("raises", "hangs", "garbage")[number // 20 % 3]
        return self.ask(""), {"gold": self.word}

    def ask(self, heard: str) -> str:
        self.word = self.rng.choice(WORDS)
        return f"say {self.word} {sum(map(ord, heard)) % 7}"

    def step(self, action: str) -> Any:
        time.sleep(self.pause)
        if self.misdeed == "raises":
            raise OSError("the desk is closed")
        if self.misdeed == "hangs":
            time.sleep(self.seconds)
        if self.misdeed == "garbage":
            return "what?"
        right = float(action.strip() == self.word)
        self.turns -= 1
        metrics = {"length": float(len(action))}
        if not self.turns:
            return "", right, True, False, {"metrics": metrics}
        return self.ask(action), right, False, False, {"gold": self.word, "metrics": metrics}

    def close(self) -> None:
        pass


class Endless(Echo):
    """An environment that never ends."""

    def step(self, action: str) -> Any:
        self.turns += 1
        return super().step(action)


class Unclosable:
    """An environment without `close`, which raises at the start of some episodes and is cancelled in others."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.number = task["number"]
        if self.number == 1:
            raise OSError("the desk is closed")
        return "say red", {}

    def step(self, action: str) -> Any:
        if self.number == 2:
            raise asyncio.CancelledError("the call was cancelled")
        if self.number == 3:
            raise KeyboardInterrupt
        return "", 1.0, True, False, {}


class Stuck(Unclosable):
    """An environment whose `close` raises when it is looked up."""

    @property
    def close(self) -> Any:
        raise KeyboardInterrupt


class Generous(Echo):
    """An environment that gives ten rewards of 0.1."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.left = 10
        return "say red", {}

    def step(self, action: str) -> Any:
        self.left -= 1
        return "say red", 0.1, not self.left, False, {}


class Closed(Echo):
    """An environment that fails in its first step."""

    def step(self, action: str) -> Any:
        raise OSError("the desk is closed")


class Clinging(Echo):
    """An environment that hangs when it is closed."""

    def close(self) -> None:
        time.sleep(self.seconds)


class Deadly(Echo):
    """An environment that crashes or hangs in one of twenty tasks, and records its processes."""

    DEEDS = ("raises", "hangs", "garbage", "exits", "crashes", "leaves", "hangs at reset", "hangs at close")

    def __init__(self, misbehaves: bool = False, seconds: float = 60.0, pids: str = "") -> None:
        super().__init__(misbehaves, seconds)
        self.pids = Path(pids)
        self.note(os.getpid())

    def note(self, process: int) -> None:
        (self.pids / str(process)).touch()

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        result = super().reset(seed=seed, task=task)
        if self.misbehaves and task["number"] % 20 == 3:
            self.misdeed = self.DEEDS[task["number"] // 20]
        if self.misdeed == "hangs at reset":
            time.sleep(self.seconds)
        return result

    def step(self, action: str) -> Any:
        if self.misdeed == "exits":
            os._exit(3)
        if self.misdeed == "crashes":
            ctypes.string_at(0)
        if self.misdeed == "leaves":
            self.note(subprocess.Popen(["sleep", str(self.seconds)]).pid)
            sys.exit(4)
        return super().step(action)

    def close(self) -> None:
        if self.misdeed == "hangs at close":
            time.sleep(self.seconds)


class Short:
    """A checker that accepts answers with an even number of characters and gives feedback."""

    def check(self, dialogue: Any) -> Verdict:
        last = dialogue.messages[-1]["content"]
        if "broken" in dialogue.task:
            raise KeyError("no goal")
        return Verdict(len(last) % 2 == 0, feedback="once more", target="two", metrics={"letters": float(len(last))})


class Repeat:
    """An environment that asks twice to repeat a word; with `content` every answer is correct."""

    def __init__(self, content: bool = False) -> None:
        self.content = content

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self.rng, self.turns = random.Random(seed), 2
        return self.ask()

    def ask(self) -> tuple[str, dict[str, Any]]:
        self.word = self.rng.choice(("red", "green", "blue"))
        return f"say {self.word}", {"gold": self.word}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        self.turns -= 1
        right = self.content or action.strip() == self.word
        if not self.turns:
            return "", float(right), True, False, {}
        text, info = self.ask()
        return text, None, False, False, info

    def close(self) -> None:
        pass
