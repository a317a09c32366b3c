"""A guest who orders and pays, for `partita simulate`: what it says does not hang on the answers, what it pays does.

And a checker for guests who are models.
"""

import random
from collections.abc import Mapping
from typing import Any

from make_chats import make_chat

from partita.simulation import Episode, Verdict


class Guest:
    """Says the questions of a chat, and is content if the bill is right."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The order; the right answer stands beside it."""
        chat = [message["content"] for message in make_chat(random.Random(seed))]
        self.questions, self.answers = chat[::2], chat[1::2]
        return self.questions.pop(0), {"gold": self.answers[0]}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """The next question; after the last answer whether it was right."""
        right = self.answers.pop(0)
        if not self.questions:
            return "", float(action.strip() == right), True, False, {}
        return self.questions.pop(0), None, False, False, {"gold": self.answers[0]}

    def close(self) -> None:
        """The guest leaves."""


class Paid:
    """Looks at dialogues with a guest who is a model: was the bill what the guest has ordered?"""

    def check(self, episode: Episode) -> Verdict:
        """The waiter's last words, and whether the guest has ordered what it was told to."""
        said = [(message["agent"], message["content"].strip()) for message in episode.messages]
        order = next(text for agent, text in said if agent == "user").removeprefix("I take ")
        bill = [text for agent, text in said if agent == "agent"][-1]
        told = float(order == episode.task["order"])
        return Verdict(bill == f"that was {order}", target=f"that was {order}", metrics={"order_as_told": told})
