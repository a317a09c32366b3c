"""Environments with the interfaces of Gymnasium and TRL, without these libraries."""

import random
import sys
from typing import Any

ITEMS = ("tea", "cake", "soup", "milk", "rice")


class Guess:
    """A game of guessing a word, with the interface of Gymnasium."""

    words = ("red", "green", "blue")

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries
        self.is_closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.word, self.left, self.options = random.Random(seed).choice(self.words), self.tries, options
        return "guess", {"anything": object(), "gold": self.word}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        right = action.strip() == self.word
        return "no", float(right), right, not self.left, {"metrics": {"left": self.left}, "state": self}

    def close(self) -> None:
        self.is_closed = True


class Guesses(Guess):
    """A vectorized environment."""

    num_envs = 2


class Text:
    """A text space, named as in Gymnasium."""


class Box:
    """Another space."""

    def __repr__(self) -> str:
        return "Box(0, 1)"


class Picture(Guess):
    """An environment without text observations."""

    observation_space, action_space = Box(), Text()


class Shop:
    """A shop that sells at secret prices, with the interface of TRL's environments."""

    def __init__(self, prices: int = 9) -> None:
        self.prices = prices

    def reset(self, seed: int = 0, **columns: Any) -> str | None:
        rng = random.Random(seed)
        self.item, self.price = rng.choice(ITEMS), rng.randint(1, self.prices)
        self.reward, self.closed = 0.0, False
        return f"one {self.item} please"

    def look(self, item: str) -> int:
        """What an item costs.

        Args:
            item: Its name.
        """
        if item not in ITEMS:
            raise ValueError(f"there is no {item}")
        return self.price

    def sell(self, item: str, price: int, note: str | None = None) -> str:
        """Sell an item.

        Args:
            item: Its name.
            price: What it costs.
            note: What to write on the bill.
        """
        self.reward = float((item, price) == (self.item, self.price))
        return "sold"

    def burn(self) -> None:
        """Burn the shop down."""
        raise OSError("there is no shop")

    @property
    def costly(self) -> str:
        raise AssertionError("a property is not a tool")

    def _count(self) -> int:
        return len(ITEMS)


class Stall:
    """A stall that sells one thing at a secret price."""

    reward = 0.0

    def reset(self, seed: int) -> str:
        self.price = random.Random(seed).choice(("two", "five", "nine"))
        return "one tea"

    def look(self) -> str:
        """The price."""
        return self.price

    def sell(self, price: str) -> str:
        """Sell.

        Args:
            price: Of it.
        """
        self.reward = float(price == self.price)
        return "sold"

    def imported(self, module: str) -> bool:
        """Whether a module is imported.

        Args:
            module: Its name.
        """
        return module in sys.modules


class Mute:
    """An environment without tools."""

    def reset(self) -> None: ...


class Undescribed(Mute):
    """An environment whose tool does not describe its argument."""

    def act(self, word: str) -> str:
        """Act."""
        return word


class Counter(Mute):
    """An environment with `done` and a total reward."""

    def __init__(self) -> None:
        self.count, self.done = 0, False

    def add(self, number: int) -> dict[str, int]:
        """Add.

        Args:
            number: How much.
        """
        self.count += number
        self.done = self.count > 5
        return {"count": self.count}

    def get_reward(self) -> float:
        return self.count / 10
