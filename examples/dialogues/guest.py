"""For `partita simulate`: an environment that plays a guest, and a checker for guests that are models.

The messages of the environment do not depend on the answers; its reward does.
"""

import random
from collections.abc import Mapping
from typing import Any

from make_chats import make_chat

from partita.simulation import Episode, Verdict


class Guest:
    """An environment that asks the questions of a chat. The reward is 1 if the bill is right."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the order, with the right answer as `gold`."""
        chat = [message["content"] for message in make_chat(random.Random(seed))]
        self.questions, self.answers = chat[::2], chat[1::2]
        return self.questions.pop(0), {"gold": self.answers[0]}

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Return the next question; after the last answer, the reward."""
        right = self.answers.pop(0)
        if not self.questions:
            return "", float(action.strip() == right), True, False, {}
        return self.questions.pop(0), None, False, False, {"gold": self.answers[0]}

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""


class Paid:
    """A checker for a guest that is a model: the bill must match what the guest ordered."""

    def check(self, episode: Episode) -> Verdict:
        """Check the bill; the metric `order_correct` says whether the guest ordered what its prompt says."""
        said = [(message["agent"], message["content"].strip()) for message in episode.messages]
        order = next(text for agent, text in said if agent == "user").removeprefix("I take ")
        bill = [text for agent, text in said if agent == "agent"][-1]
        metrics = {"order_correct": float(order == episode.task["order"])}
        return Verdict(bill == f"that was {order}", target=f"that was {order}", metrics=metrics)
