"""A guest who orders and pays, for `partita simulate`: what it says does not hang on the answers, what it pays does."""

import random
from collections.abc import Mapping
from typing import Any

from make_chats import make_chat


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
