"""Prompts of dialogues that go on: what the model said keeps the tokens that it said it in.

A prompt is rendered whole each time, as rows of dialogues are. Where the text of the turn before stands unchanged at
its beginning, and a piece that is encoded by itself begins behind the answer, the tokens up to there are those that the
model has seen and made. Elsewhere, as with a chat template that writes a whole prompt in one piece, all is encoded
anew, as it is for the rows that such a model learns from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.data.shaping.encoder import Encoder, PromptExample
from partita.simulation.dialogue import Dialogue


@dataclass
class Shown:
    """What the model has been shown of a dialogue."""

    text: str = ""
    """The last prompt and the answer to it."""
    ids: list[int] = field(default_factory=list)
    """Their tokens."""


@dataclass
class TurnEncoder:
    """Makes prompts of dialogues, and counts those that were encoded anew."""

    encoder: Encoder
    name: str
    """Of the dialogue input."""
    decode: Any
    """From tokens to text, special tokens left out."""
    anew: int = 0
    """Prompts, but the first of a dialogue, in which an earlier answer may have other tokens than it was made of."""

    def encode(self, dialogues: Sequence[Dialogue], shown: Sequence[Shown]) -> list[PromptExample]:
        """The prompt of each dialogue, which goes on from what was `shown` of it."""
        found = []
        for dialogue, before in zip(dialogues, shown, strict=True):
            row = {self.name: {"messages": dialogue.shown, "learn_all": False}}
            prompt = self.encoder.encode_turn(row, key=dialogue.key, before=before.ids, behind=before.text)
            if before.text and prompt.error is None and prompt.input_ids[: len(before.ids)] != before.ids:
                self.anew += 1
            found.append(prompt)
        return found

    def after(self, prompt: PromptExample, dialogue: Dialogue) -> Shown:
        """What was shown once the model has answered a prompt, as far as it can be kept."""
        reply = dialogue.replies[-1]
        if dialogue.shows_gold or self.decode(reply.tokens, skip_special_tokens=True) != reply.text:
            return Shown()  # another answer is shown in its place, or a stop text was cut off
        return Shown(prompt.text + reply.text, [*prompt.input_ids, *reply.tokens])
